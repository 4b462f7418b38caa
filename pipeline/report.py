"""The closing table of a run: the figures of all answered requests, and the busy time of each stage.

Figures that are undefined for a run, such as the hit rate without a speculation cache, are shown as `-`.
Rounds after the prefill are called decode rounds: waits and overlaps are measured in them only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.messages import RequestFinished, StageName

_UNDEFINED = "-"


class BusyTime(Protocol):
    """What the table needs to know of a stage."""

    @property
    def busy_ns(self) -> int:
        """Time in which the stage did something."""


def closing_table(
    finished: Sequence[RequestFinished], stages: Mapping[StageName, BusyTime], *, wall_seconds: float
) -> str:
    """Format the table, one figure a line.

    finished: the requests that were answered.
    stages: figures of each stage at the end of the run; empty if they are not known.
    wall_seconds: from the first submission to the last end.
    """
    rows = [*_token_rows(finished, wall_seconds), *_speculation_rows(finished), *_time_rows(finished)]
    rows += [*_kv_rows(finished), *_plan_rows(finished)]
    num_rounds = sum(request.metrics.num_rounds for request in finished)
    for name, stage in stages.items():
        busy_ms = _ratio(stage.busy_ns / 1e6, num_rounds)
        rows.append((f"{name.value} busy", _number(busy_ms, 2), "ms per round, prefills included"))
    return _aligned(rows)


def _token_rows(finished: Sequence[RequestFinished], wall_seconds: float) -> list[tuple[str, str, str]]:
    metrics = [request.metrics for request in finished]
    num_tokens = sum(request.num_output_tokens for request in finished)
    speeds = [
        (m.tokens_per_second * m.decode_seconds, m.decode_seconds)
        for m in metrics
        if m.tokens_per_second is not None and m.decode_seconds is not None
    ]
    speed = _ratio(sum(tokens for tokens, _ in speeds), sum(seconds for _, seconds in speeds))
    first = _ratio(sum(m.ttft_ms for m in metrics), len(metrics))
    return [
        ("requests", str(len(finished)), ""),
        ("tokens", str(num_tokens), f"in {wall_seconds:.1f} s, prefills included"),
        ("tokens/s", _number(speed, 1), "of one request while it decodes"),
        ("time to first token", _number(first, 1), "ms, mean"),
        ("rounds", str(sum(m.num_rounds for m in metrics)), "target forwards, prefills included"),
    ]


def _speculation_rows(finished: Sequence[RequestFinished]) -> list[tuple[str, str, str]]:
    metrics = [request.metrics for request in finished]
    length = _ratio(sum(r.num_output_tokens for r in finished), sum(m.num_rounds for m in metrics))
    rate = _ratio(sum(m.num_accepted_tokens for m in metrics), sum(m.num_proposed_tokens for m in metrics))
    hits = sum(m.cache_hits or 0 for m in metrics)
    misses = sum(m.cache_misses or 0 for m in metrics)
    ready = [
        (m.mean_ready_length * m.cache_hits, m.cache_hits)
        for m in metrics
        if m.mean_ready_length is not None and m.cache_hits
    ]
    ready_length = _ratio(sum(tokens for tokens, _ in ready), sum(hits for _, hits in ready))
    return [
        ("acceptance length", _number(length, 2), "tokens per round, the bonus token included"),
        ("acceptance rate", _number(rate, 3), "accepted / proposed tokens, the bonus token not included"),
        (
            "hit rate",
            _number(_ratio(hits, hits + misses), 3),
            "outcomes with a token drafted ahead",
        ),
        ("ready length", _number(ready_length, 2), "drafted tokens waiting on a hit"),
    ]


def _time_rows(finished: Sequence[RequestFinished]) -> list[tuple[str, str, str]]:
    metrics = [request.metrics for request in finished]
    rounds = sum(max(m.num_rounds - 1, 0) for m in metrics)

    def per_round(values: Sequence[float]) -> str:
        return _number(_ratio(sum(values), rounds), 2)

    unit = "ms per decode round"
    seconds = [1000 * m.decode_seconds for m in metrics if m.decode_seconds is not None]
    return [
        ("round", per_round(seconds), unit),
        ("target computed", per_round([m.target_compute_ms for m in metrics]), unit),
        (
            "target waited",
            per_round([m.target_wait_ms for m in metrics]),
            f"{unit}, for drafts or mail",
        ),
        ("target and draft at once", per_round([m.overlap_ms for m in metrics]), unit),
        ("overhead", per_round([m.overhead_ms for m in metrics]), f"{unit}, not computing and not drafting"),
    ]


def _kv_rows(finished: Sequence[RequestFinished]) -> list[tuple[str, str, str]]:
    """What the KV cache saved and cost; nothing where it did neither."""
    num_cached = sum(request.metrics.num_cached_prompt_tokens for request in finished)
    num_prompt = sum(request.num_prompt_tokens for request in finished)
    num_preemptions = sum(request.metrics.num_preemptions for request in finished)
    rows = [
        ("prompt tokens cached", str(num_cached), f"of {num_prompt}: an earlier request began with them"),
        ("pre-emptions", str(num_preemptions), "requests that were read again, for want of KV pages"),
    ]
    return [row for row in rows if row[1] != "0"]


def _plan_rows(finished: Sequence[RequestFinished]) -> list[tuple[str, str, str]]:
    """What `plan=auto` went by at the end of the last request; nothing where it had no say."""
    plans = [request.metrics.plan for request in finished if request.metrics.plan is not None]
    if not plans:
        return []
    plan = plans[-1]
    rests = sum(request.metrics.num_rest_rounds for request in finished)
    return [
        ("plan: verification", _number(plan.verify_ms, 2), f"ms, and {plan.verify_row_ms:.2f} a row more"),
        ("plan: draft step", _number(plan.step_ms, 2), f"ms, and {plan.step_row_ms:.2f} a row more"),
        ("plan: acceptance", _number(plan.acceptance, 3), "of a child, where its parent was accepted"),
        ("plan: hit rate", _number(plan.hit_rate, 3), "of outcomes, where they were prepared"),
        ("plan: price of time", _number(plan.tokens_per_second, 1), "tokens/s, of all requests"),
        (
            "plan: speculating",
            _number(plan.speculative_tokens_per_second, 1),
            f"tokens/s of one request; decoding plainly: {plan.plain_tokens_per_second:.1f}",
        ),
        ("plan: least chance", _number(plan.least_chance, 3), "of a node that is worth verifying"),
        ("plan: branches", str(plan.num_branches), "outcomes prepared a round, at most"),
        ("plan: rested", str(rests), "rounds without speculation: it did not pay, or to compare"),
    ]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _number(value: float | None, digits: int) -> str:
    return _UNDEFINED if value is None else f"{value:.{digits}f}"


def _aligned(rows: Sequence[tuple[str, str, str]]) -> str:
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    lines = [f"{name:<{name_width}}  {value:>{value_width}}  {note}".rstrip() for name, value, note in rows]
    return "\n".join(lines)
