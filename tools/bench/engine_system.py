"""Our own systems: the engine, one request at a time, with the figures that it measures itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from conf.schema import DraftKind, RunConfig
from pipeline.engine import Engine
from pipeline.errors import RequestError
from pipeline.messages import ChatTurn, RequestFailed, RequestFinished, Sampling, TextBlock
from pipeline.placement import plan_cores
from pipeline.topology import usable_cores
from tools.bench.identity import short_path
from tools.bench.protocol import Answer, EngineSpec, Question

_WAIT_S = 5.0
"""The engine looks after its stages while it waits, so this needs no care."""


class EngineSystem:
    """A started engine."""

    def __init__(self, engine: Engine, given: str) -> None:
        self.given = given
        self._engine = engine
        self._num_asked = 0

    def answer(self, question: Question) -> Answer:
        """Raises `RequestError` for a request that fails, and `EngineDead`."""
        request_id = str(self._num_asked)
        self._num_asked += 1
        began = time.monotonic()
        self._engine.submit(
            request_id=request_id,
            prompt=None if question.is_chat else question.text,
            chat=[ChatTurn(role="user", content=question.text)] if question.is_chat else None,
            sampling=Sampling(
                max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed
            ),
        )
        token_ids: list[int] = []
        while True:
            for event in self._engine.events(_WAIT_S):
                match event:
                    case TextBlock():
                        token_ids.extend(event.token_ids)
                    case RequestFailed():
                        raise RequestError(event.reason)
                    case RequestFinished():
                        return _answer(event, token_ids, wall_seconds=time.monotonic() - began)


@contextmanager
def open_system(spec: EngineSpec) -> Iterator[EngineSystem]:
    """Start the engine, and stop it afterwards. Raises `ConfigError` and `EngineDead`."""
    given = describe(spec.config)
    with Engine(spec.config) as engine:
        yield EngineSystem(engine, given)


def describe(config: RunConfig) -> str:
    """The configuration in a line: what the engine runs with."""
    cores = plan_cores(config.placement, usable_cores())
    speculation = config.speculation
    parts = [
        f"{config.model.dtype.value}, cpu_kernels={config.model.cpu_kernels.value}, "
        f"weights={config.model.weights.value}",
        f"{config.placement.name}: target on cores {list(cores.target)}, the rest on {list(cores.draft)}",
    ]
    draft = speculation.draft
    if draft.kind is DraftKind.none:
        return "; ".join([*parts, "no draft"])
    detail = short_path(draft.path) if draft.path is not None else draft.layers
    parts.append(
        f"draft {draft.kind.value}{'' if detail is None else f' {detail}'}, depth {speculation.depth}"
    )
    if speculation.prepare_outcomes:
        parts.append(
            f"budget {speculation.budget}, fan-out {speculation.fan_out.value}, "
            f"backup {speculation.backup.value}"
        )
    return "; ".join(parts)


def _answer(finished: RequestFinished, token_ids: list[int], *, wall_seconds: float) -> Answer:
    metrics = finished.metrics
    return Answer(
        token_ids=token_ids,
        num_prompt_tokens=finished.num_prompt_tokens,
        ttft_ms=metrics.ttft_ms,
        num_decoded=max(len(token_ids) - 1, 0),  # the prefill commits exactly one
        decode_seconds=metrics.decode_seconds,
        num_rounds=metrics.num_rounds,
        wall_seconds=wall_seconds,
        metrics=metrics,
    )
