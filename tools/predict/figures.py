"""From the counts of cells to rates with standard errors. Pure arithmetic.

Rounds of one answer resemble one another, prompts do not: so the standard error of a rate is that of a ratio
of two sums over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.predict.cells import Cell

Count = tuple[int, int]
"""Of one prompt: hits, and outcomes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A share and its standard error; None for fewer than two prompts."""

    value: float
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one or more cells together. Undefined figures are None."""

    num_answers: int
    num_outcomes: int
    """Looked up in the speculation cache."""
    hit_rate: Rate | None
    gain: Rate | None
    """Hit rate beyond that of the cells compared with, on the same prompts."""
    ready_length: float | None
    """Drafted tokens that were ready, mean over the hits."""
    acceptance_length: float | None
    """Tokens a target forward, the bonus token included."""


def figures_of(cells: Sequence[Cell], compared_with: Sequence[Cell] = ()) -> Figures:
    """compared_with: cells of the same prompts in the same order."""
    answers = [answer for cell in cells for answer in cell.answers]
    others = [answer for cell in compared_with for answer in cell.answers]
    hits = sum(answer.hits for answer in answers)
    num_rounds = sum(answer.num_rounds for answer in answers)
    counts = [(answer.hits, answer.hits + answer.misses) for answer in answers]
    other_counts = [(answer.hits, answer.hits + answer.misses) for answer in others]
    return Figures(
        num_answers=len(answers),
        num_outcomes=sum(total for _, total in counts),
        hit_rate=rate_of(counts),
        gain=difference_of(counts, other_counts) if others else None,
        ready_length=sum(answer.ready_tokens for answer in answers) / hits if hits else None,
        acceptance_length=sum(len(a.token_ids) for a in answers) / num_rounds if num_rounds else None,
    )


def planned_counts(cells: Sequence[Cell], policy: str) -> list[Count]:
    """Of every prompt, all cells together: outcomes that the policy's plans of the same rounds had."""
    by_prompt: dict[tuple[str, int], Count] = {}
    for cell in cells:
        for answer in cell.answers:
            key = (cell.key.set_name, answer.index)
            hits, total = by_prompt.get(key, (0, 0))
            by_prompt[key] = (hits + answer.planned[policy], total + answer.num_planned)
    return list(by_prompt.values())


def rate_of(counts: Sequence[Count]) -> Rate | None:
    """All hits over all outcomes; None without any."""
    influences = _influences(counts)
    return None if influences is None else Rate(value=_ratio(counts), error=_error(influences))


def difference_of(counts: Sequence[Count], others: Sequence[Count]) -> Rate | None:
    """How much higher the first rate is, both of the same prompts: how those differ is no noise then."""
    one, other = _influences(counts), _influences(others)
    if one is None or other is None:
        return None
    influences = [a - b for a, b in zip(one, other, strict=True)]
    return Rate(value=_ratio(counts) - _ratio(others), error=_error(influences))


def _ratio(counts: Sequence[Count]) -> float:
    return sum(hits for hits, _ in counts) / sum(total for _, total in counts)


def _influences(counts: Sequence[Count]) -> list[float] | None:
    """How much each prompt moves the rate (the linearised ratio); they sum to 0."""
    total = sum(of_prompt for _, of_prompt in counts)
    if not total:
        return None
    rate = _ratio(counts)
    return [(hits - rate * of_prompt) / total for hits, of_prompt in counts]


def _error(influences: Sequence[float]) -> float | None:
    count = len(influences)
    if count < 2:
        return None
    return math.sqrt(count / (count - 1) * sum(influence**2 for influence in influences))
