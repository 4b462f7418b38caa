"""What recording costs: the same request with and without it, in turns, in one engine.

Beside the measured difference, which drowns in the noise of a busy machine, stands what it must be: the spans
that each stage records in a round, times what one takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.engine import Engine
from pipeline.errors import EngineDead
from pipeline.messages import EndDraft, RequestFailed, RequestFinished, Sampling, StageName
from pipeline.spans import DEFAULT_NUM_SPANS, SpanKind, SpanRecorder

_PROMPT = "The saguaro is a tall cactus of the Sonoran Desert. It grows slowly, and"
_SEED = 1
_NUM_TIMED_SPANS = 100_000
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Round times with and without recording, pair by pair, and what is recorded."""

    off_ms: Sequence[float]
    on_ms: Sequence[float]
    spans_per_round: dict[StageName, float]
    span_us: float

    def report(self) -> str:
        """In a few lines."""
        off, on = np.array(self.off_ms), np.array(self.on_ms)
        difference = np.median(on / off) - 1
        draws = np.random.default_rng(_SEED).integers(len(off), size=(_RESAMPLES, len(off)))
        low, high = np.percentile(np.median((on / off)[draws], axis=1) - 1, [2.5, 97.5])
        busiest = max(self.spans_per_round, key=lambda name: self.spans_per_round[name])
        added_us = self.spans_per_round[busiest] * self.span_us
        return "\n".join(
            [
                f"round, recording off: {np.median(off):.3f} ms; on: {np.median(on):.3f} ms (medians)",
                f"on over off: {difference:+.2%}, 95 % {low:+.2%} to {high:+.2%} ({len(off)} pairs)",
                f"one span takes {self.span_us:.2f} us; the busiest stage, {busiest.value}, records "
                f"{self.spans_per_round[busiest]:.1f} a round: {added_us:.1f} us, "
                f"{added_us / 1000 / np.median(off):.3%} of a round",
            ]
        )


def measure_cost(engine: Engine, *, num_pairs: int, max_tokens: int) -> Cost:
    """Answer one request over and over. Raises `EngineDead`."""
    _round_ms(engine, "warm-up", max_tokens)
    times: dict[bool, list[float]] = {False: [], True: []}
    num_spans: dict[StageName, int] = {}
    num_rounds = 0
    for pair in range(num_pairs):
        # Which comes first takes turns too.
        for is_on in (pair % 2 == 0, pair % 2 == 1):
            if is_on:
                engine.start_profile(num_spans=DEFAULT_NUM_SPANS)
            round_ms, rounds = _round_ms(engine, f"{pair}-{is_on}", max_tokens)
            times[is_on].append(round_ms)
            if is_on:
                num_rounds += rounds
                for name, stage in engine.end_profile().stages.items():
                    num_spans[name] = num_spans.get(name, 0) + sum(1 for _ in stage.spans.spans())
    return Cost(
        off_ms=times[False],
        on_ms=times[True],
        spans_per_round={name: count / num_rounds for name, count in num_spans.items()},
        span_us=span_us(),
    )


def span_us() -> float:
    """What recording one span takes of a core, of the dearer kind, in microseconds."""
    spans = SpanRecorder()
    spans.start(num_spans=DEFAULT_NUM_SPANS, now_ns=0)
    message = EndDraft(request_id="request")
    # Of this thread's own time, so that a busy machine does not count.
    began_ns = time.thread_time_ns()
    for _ in range(_NUM_TIMED_SPANS):
        if spans.is_on:
            spans.add_message(
                SpanKind.SEND,
                began_ns,
                time.monotonic_ns(),
                message=message,
                peer=StageName.SPECULATOR,
                sent_ns=began_ns,
            )
    return (time.thread_time_ns() - began_ns) / _NUM_TIMED_SPANS / 1000


def _round_ms(engine: Engine, request_id: str, max_tokens: int) -> tuple[float, int]:
    """Decode time a round, and how many rounds there were."""
    sampling = Sampling(max_tokens=max_tokens, seed=_SEED)
    engine.submit(request_id=request_id, prompt=_PROMPT, sampling=sampling)
    while True:
        for event in engine.events(5.0):
            if isinstance(event, RequestFailed):
                raise EngineDead(f"the request failed: {event.reason}")
            if isinstance(event, RequestFinished):
                metrics, rounds = event.metrics, event.metrics.num_rounds - 1
                if metrics.decode_seconds is None:
                    raise EngineDead("the answer ended with its first token: nothing to measure")
                return 1000 * metrics.decode_seconds / rounds, rounds
