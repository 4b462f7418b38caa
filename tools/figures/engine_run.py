"""Runs a configuration in real processes, and adds up what the rounds of its requests took and committed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from conf.schema import RunConfig
from pipeline.engine import Engine
from pipeline.errors import EngineDead, RequestError
from pipeline.messages import (
    ProposalSource,
    RequestFailed,
    RequestFinished,
    RequestMetrics,
    Sampling,
    TextBlock,
)

_WAIT_S = 5.0


@dataclass(slots=True)
class Measured:
    """Figures of some requests that shared their rounds. Times are means of a decode round, in ms."""

    metrics: list[RequestMetrics] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    tokens_by_source: dict[ProposalSource, list[int]] = field(default_factory=dict)
    """Tokens of each full round of a request, the bonus included, by where its proposal came from."""
    batch: int = 1

    @property
    def num_rounds(self) -> int:
        """Decode rounds, each counted once for every request in it."""
        return sum(m.num_rounds - 1 for m in self.metrics)

    def per_round(self, name: str) -> float:
        """Mean of a field of `RequestMetrics` that is a sum over decode rounds."""
        return sum(float(getattr(m, name) or 0.0) for m in self.metrics) / self.num_rounds

    @property
    def round_ms(self) -> float:
        """Wall time of a decode round."""
        return 1000 * self.per_round("decode_seconds")

    @property
    def tokens_per_second(self) -> float:
        """Of all requests that share the rounds together, while they decode."""
        decoded = sum(len(ids) - 1 for ids in self.token_ids)
        return self.batch * decoded / sum(m.decode_seconds or 0.0 for m in self.metrics)

    @property
    def hit_rate(self) -> float:
        """Hits over look-ups; 0 without any."""
        hits, misses = (
            sum(getattr(m, key) or 0 for m in self.metrics) for key in ("cache_hits", "cache_misses")
        )
        return hits / (hits + misses) if hits + misses else 0.0

    def tokens_after(self, source: ProposalSource) -> float:
        """Tokens of a round whose proposal came from there; 0 without any."""
        return mean(self.tokens_by_source.get(source) or [0])

    @property
    def tokens_per_round(self) -> float:
        """Of one request."""
        return sum(len(ids) - 1 for ids in self.token_ids) / self.num_rounds


def check_tokens(label: str, measured: Measured, plain: Measured) -> None:
    """Raise `EngineDead` if a system answered otherwise than plain decoding: its speed would mean nothing.

    plain: of the same prompts in the same order, or of more.
    """
    if measured.token_ids != plain.token_ids[: len(measured.token_ids)]:
        raise EngineDead(
            f"{label} at batch {measured.batch}: its tokens differ from those of plain decoding, so its "
            "speed means nothing, and no figure is made"
        )


def measure(
    config: RunConfig, *, num_groups: int, max_tokens: int, temperature: float, first_seed: int
) -> Measured:
    """Answer `num_groups` times as many prompts as share a round, after a short one that warms everything up.

    config: with resolved models. Prompts differ in one character; the request with index i has seed
    first_seed + i. Raises `EngineDead`, and `RequestError` for a request that fails.
    """
    measured = Measured(batch=config.max_requests)
    with Engine(config) as engine:
        _answer(engine, ["warm up"], Measured(), max_tokens=16, temperature=temperature, first_seed=0)
        for group in range(num_groups):
            numbers = range(group * config.max_requests, (group + 1) * config.max_requests)
            prompts = [f"text number {first_seed + number}" for number in numbers]
            _answer(
                engine,
                prompts,
                measured,
                max_tokens=max_tokens,
                temperature=temperature,
                first_seed=first_seed + numbers[0],
            )
    return measured


def _answer(
    engine: Engine,
    prompts: Sequence[str],
    measured: Measured,
    *,
    max_tokens: int,
    temperature: float,
    first_seed: int,
) -> None:
    """Submit the prompts together and wait for all of them."""
    blocks: dict[str, list[TextBlock]] = {}
    metrics: dict[str, RequestMetrics] = {}
    for index, prompt in enumerate(prompts):
        request_id = f"{prompt}#{index}"
        blocks[request_id] = []
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=first_seed + index)
        engine.submit(request_id=request_id, prompt=prompt, sampling=sampling)
    deadline = time.monotonic() + 600
    while len(metrics) < len(prompts):
        if time.monotonic() > deadline:
            raise EngineDead("no answer within 600 s; choose fewer tokens")
        for event in engine.events(_WAIT_S):
            match event:
                case TextBlock():
                    blocks[event.request_id].append(event)
                case RequestFailed():
                    raise RequestError(event.reason)
                case RequestFinished():
                    metrics[event.request_id] = event.metrics
    for request_id, listed in blocks.items():
        measured.metrics.append(metrics[request_id])
        measured.token_ids.append([token for block in listed for token in block.token_ids])
        for block in listed[1:-1]:  # the first is the prefill, the last may be cut short
            if block.source is not None:
                measured.tokens_by_source.setdefault(block.source, []).append(len(block.token_ids))
