"""From answers to numbers: medians over repeats, sums over prompts, ratios with a bootstrap interval.

Pure arithmetic on rows; knows nothing about systems, tokens or tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from pipeline.messages import RequestMetrics
from tools.bench.journal import PromptKey, Row
from tools.bench.protocol import Answer

_RESAMPLES = 2000
_BOOTSTRAP_SEED = 1
_INTERVAL_PERCENT = (2.5, 97.5)
_HIGH_PERCENT = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """One system on prompts that were asked at once: medians over the repeats."""

    num_decoded: float
    """Tokens after the first block of each answer; 0 if nothing was decoded."""
    seconds: float
    """From the first block of any answer to the last block of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGaps:
    """Inter-token times over all tokens of all answers, repeats included, but for those that came first.

    A block of n tokens that arrives t after the one before counts as n tokens with t / n each: the mean is
    then the time a token, whatever the blocks.
    """

    median_ms: float
    p95_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Speed over the baseline's, on the prompts that both decoded."""

    value: float
    interval: tuple[float, float] | None
    """95 %, from resampled prompts; None for fewer than two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Where an average decode round of our engine goes, in ms. They overlap: see `RequestMetrics`."""

    num_rounds: float
    """Target forwards that committed tokens on one pass over the prompts, prefills included."""
    target_ms: float | None
    wait_ms: float | None
    overlap_ms: float | None
    overhead_ms: float | None


def decode_times(rows: Iterable[Row]) -> dict[PromptKey, DecodeTimes]:
    """Of one system in one case, by the first prompt of those that were asked at once."""
    repeats: dict[PromptKey, list[list[Answer]]] = defaultdict(list)
    for row in rows:
        repeats[row.set_name, row.index].append(row.answers)
    return {
        key: DecodeTimes(
            num_decoded=median(sum(answer.num_decoded for answer in answers) for answers in listed),
            seconds=median(_decode_seconds(answers) for answers in listed),
        )
        for key, listed in repeats.items()
    }


def ttft_ms(rows: Iterable[Row]) -> float:
    """Time to first token: median over prompts of the median over repeats."""
    return median(
        median(answer.ttft_ms for answer in answers) for answers in _answers_by_prompt(rows).values()
    )


def token_gaps(rows: Iterable[Row]) -> TokenGaps | None:
    """None if nothing was decoded."""
    gaps_s: list[float] = []
    for row in rows:
        for answer in row.answers:
            for gap_s, count in zip(np.diff(answer.block_times_s), answer.block_tokens[1:], strict=True):
                gaps_s += [float(gap_s) / count] * count
    if not gaps_s:
        return None
    middle, high = np.percentile(gaps_s, (50, _HIGH_PERCENT))
    return TokenGaps(median_ms=1000 * float(middle), p95_ms=1000 * float(high))


def speed(times: Iterable[DecodeTimes]) -> float | None:
    """Tokens a second while decoding: all tokens over all seconds. None if nothing was decoded."""
    listed = list(times)
    seconds = sum(entry.seconds for entry in listed)
    return sum(entry.num_decoded for entry in listed) / seconds if seconds > 0 else None


def speed_ratio(
    system: Mapping[PromptKey, DecodeTimes], baseline: Mapping[PromptKey, DecodeTimes]
) -> Ratio | None:
    """None if there are no prompts that both decoded."""
    shared = [
        key
        for key, times in system.items()
        if times.seconds > 0 and key in baseline and baseline[key].seconds > 0
    ]
    if not shared:
        return None
    columns = np.array(
        [
            (
                system[key].num_decoded,
                system[key].seconds,
                baseline[key].num_decoded,
                baseline[key].seconds,
            )
            for key in shared
        ]
    )
    value = float(_ratio_of_sums(columns.sum(axis=0)))
    if len(shared) < 2:
        return Ratio(value=value, interval=None)
    # Prompts are resampled, and a prompt keeps both its sides: what differs between prompts is no noise.
    draws = np.random.default_rng(_BOOTSTRAP_SEED).integers(len(shared), size=(_RESAMPLES, len(shared)))
    ratios = _ratio_of_sums(columns[draws].sum(axis=1))
    low, high = np.percentile(ratios, _INTERVAL_PERCENT)
    return Ratio(value=value, interval=(float(low), float(high)))


def acceptance_length(rows: Iterable[Row]) -> float | None:
    """Output tokens a round, the bonus token included. None where rounds are not known."""
    answers = [answer for row in rows for answer in row.answers]
    rounds = [answer.num_rounds for answer in answers if answer.num_rounds is not None]
    if len(rounds) < len(answers) or not sum(rounds):
        return None
    return sum(len(answer.token_ids) for answer in answers) / sum(rounds)


def hit_rate(rows: Iterable[Row]) -> float | None:
    """Hits over looked-up outcomes. None without a speculation cache."""
    metrics = [answer.metrics for row in rows for answer in row.answers]
    hits = sum(m.cache_hits or 0 for m in metrics if m is not None)
    misses = sum(m.cache_misses or 0 for m in metrics if m is not None)
    return hits / (hits + misses) if hits + misses else None


def round_times(rows: Iterable[Row]) -> RoundTimes | None:
    """Medians over the repeats, summed over prompts, a decode round. None for a peer."""
    by_prompt = []
    for answers in _answers_by_prompt(rows).values():
        metrics = [answer.metrics for answer in answers if answer.metrics is not None]
        if len(metrics) < len(answers):
            return None
        by_prompt.append(metrics)
    decode_rounds = _sum_of_medians(by_prompt, lambda m: max(m.num_rounds - 1, 0))

    def a_round(field: Callable[[RequestMetrics], float]) -> float | None:
        return _sum_of_medians(by_prompt, field) / decode_rounds if decode_rounds else None

    return RoundTimes(
        num_rounds=_sum_of_medians(by_prompt, lambda m: m.num_rounds),
        target_ms=a_round(lambda m: m.target_compute_ms),
        wait_ms=a_round(lambda m: m.target_wait_ms),
        overlap_ms=a_round(lambda m: m.overlap_ms),
        overhead_ms=a_round(lambda m: m.overhead_ms),
    )


def _answers_by_prompt(rows: Iterable[Row]) -> dict[PromptKey, list[Answer]]:
    answers: dict[PromptKey, list[Answer]] = defaultdict(list)
    for row in rows:
        for key, answer in row.answers_by_prompt():
            answers[key].append(answer)
    return answers


def _decode_seconds(answers: Sequence[Answer]) -> float:
    """0 if nothing was decoded."""
    if not any(answer.num_decoded for answer in answers):
        return 0.0
    return max(a.block_times_s[-1] for a in answers) - min(a.block_times_s[0] for a in answers)


def _sum_of_medians(
    by_prompt: Sequence[Sequence[RequestMetrics]], field: Callable[[RequestMetrics], float]
) -> float:
    return sum(median(field(metrics) for metrics in repeats) for repeats in by_prompt)


def _ratio_of_sums(sums: np.ndarray) -> np.ndarray:
    """[..., 4] tokens and seconds of the system, then of the baseline -> [...]."""
    ratios: np.ndarray = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    return ratios
