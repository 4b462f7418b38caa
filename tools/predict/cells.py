"""One cell of a study: a system, policy, budget and temperature on a set of prompts; and what came out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class CellKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which cell."""

    system: str
    """Label."""
    budget: int
    temperature: float
    policy: str
    set_name: str

    def __str__(self) -> str:
        return f"{self.system}, B={self.budget}, T={self.temperature:g}, {self.policy}, {self.set_name}"


class AnswerCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one prompt contributes."""

    index: int
    """Of the prompt in its set."""
    token_ids: list[int]
    num_rounds: int
    """Target forwards, the prefill included."""
    hits: int
    misses: int
    ready_tokens: int
    """Drafted tokens that were ready, summed over the hits."""
    rank_counts: list[int]
    """Entry i: outcomes whose bonus token was the (i + 1)-th likeliest at its node that was not proposed; the
    last entry: those that were beyond, or that the draft did not name."""
    planned: dict[str, int]
    """By policy: how many of these outcomes its plan of the same round had."""

    @property
    def num_planned(self) -> int:
        """Outcomes of rounds that were planned."""
        return sum(self.rank_counts)


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished cell."""

    key: CellKey
    answers: list[AnswerCounts]


def total_rank_counts(cells: Sequence[Cell]) -> NDArray[np.float64]:
    """Rank counts of several cells, of equal budgets, together."""
    counts: NDArray[np.float64] = np.sum(
        [answer.rank_counts for cell in cells for answer in cell.answers], axis=0, dtype=np.float64
    )
    return counts
