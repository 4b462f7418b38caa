"""Our own systems: the engine, with the figures that it measures itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from conf.schema import RunConfig
from pipeline.engine import Engine
from pipeline.errors import RequestError
from pipeline.messages import ChatTurn, RequestFailed, RequestFinished, Sampling, TextBlock
from pipeline.placement import plan_cores
from pipeline.topology import usable_cores
from tools.bench.arrivals import Arrivals
from tools.bench.protocol import Answer, Batch, EngineSpec, Question
from tools.run_in_words import speculation_in_words

_WAIT_S = 5.0
"""The engine looks after its stages while it waits, so this needs no care."""


class EngineSystem:
    """A started engine."""

    def __init__(self, engine: Engine, given: str) -> None:
        self.given = given
        self._engine = engine
        self._num_asked = 0

    def answer(self, batch: Batch) -> list[Answer]:
        """Raises `RequestError` for a request that fails, and `EngineDead`."""
        began = time.monotonic()
        open_requests: dict[str, Arrivals] = {}
        for question in batch.questions:
            request_id = str(self._num_asked)
            self._num_asked += 1
            open_requests[request_id] = Arrivals(began)
            self._submit(request_id, question, batch.temperature)
        answers: dict[str, Answer] = {}
        order = list(open_requests)
        while open_requests:
            for event in self._engine.events(_WAIT_S):
                match event:
                    case TextBlock():
                        open_requests[event.request_id].add(event.token_ids)
                    case RequestFailed():
                        raise RequestError(event.reason)
                    case RequestFinished():
                        answers[event.request_id] = open_requests.pop(event.request_id).answer(
                            num_prompt_tokens=event.num_prompt_tokens,
                            num_rounds=event.metrics.num_rounds,
                            metrics=event.metrics,
                        )
        return [answers[request_id] for request_id in order]

    def _submit(self, request_id: str, question: Question, temperature: float) -> None:
        self._engine.submit(
            request_id=request_id,
            prompt=None if question.is_chat else question.text,
            chat=[ChatTurn(role="user", content=question.text)] if question.is_chat else None,
            sampling=Sampling(max_tokens=question.max_tokens, temperature=temperature, seed=question.seed),
        )


@contextmanager
def open_system(spec: EngineSpec) -> Iterator[EngineSystem]:
    """Start the engine, and stop it afterwards. Raises `ConfigError` and `EngineDead`."""
    given = describe(spec.config)
    with Engine(spec.config) as engine:
        yield EngineSystem(engine, given)


def describe(config: RunConfig) -> str:
    """The configuration in a line: what the engine runs with."""
    cores = plan_cores(config.placement, usable_cores())
    numbers = (
        f"{config.model.name}, time scale {config.model.emulated.time_scale:g}"
        if config.model.is_emulated
        else f"{config.model.dtype.value}, cpu_kernels={config.model.cpu_kernels.value}, "
        f"weights={config.model.weights.value}"
    )
    return "; ".join(
        [
            numbers,
            f"up to {config.max_requests} request{'s' if config.max_requests > 1 else ''} at once",
            f"{config.placement.name}: target on cores {list(cores.target)}, the rest on {list(cores.draft)}",
            *speculation_in_words(config.speculation),
        ]
    )
