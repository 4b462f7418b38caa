"""Outcome probabilities of one round, from what the draft thinks of every token after every node.

`P(outcome) = P(path to the node accepted) * P(bonus token | node)`, where P is the draft's law under the
shared noise, made softer or sharper by a temperature tau: `p^(1/tau)`, renormalised over the tokens that are
known. tau is fitted online, to what the target chose in earlier rounds. Works on chains and trees alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_TAUS = tuple(math.pow(2.0, step / 4) for step in range(-10, 7))
"""From 0.18 to 2.8."""
_TAU_COLUMN = np.array(_TAUS)[:, None]
_DECAY = 0.995
"""Per observed choice: two hundred of them are remembered."""
_UNKNOWN = math.log(1e-4)
"""Log-probability of a token that the draft did not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCandidates:
    """What the speculator said of one round. Row 0 is the root, row i + 1 is node i."""

    round_id: int
    token_ids: list[int]
    parents: list[int]
    rows: list[dict[int, float]]
    """Of each row the candidates and their log-probabilities, best first."""

    def children(self) -> list[set[int]]:
        """Tokens proposed below each row."""
        below: list[set[int]] = [set() for _ in self.rows]
        for token, parent in zip(self.token_ids, self.parents, strict=True):
            below[parent + 1].add(token)
        return below


def sharpened(row: dict[int, float], tau: float) -> dict[int, float]:
    """Log-probabilities of a row at temperature tau, summing to 1 over the tokens that it names."""
    if not row:
        return {}
    scaled = [log_prob / tau for log_prob in row.values()]
    peak = max(scaled)
    total = peak + math.log(sum(math.exp(value - peak) for value in scaled))
    return {token: value - total for token, value in zip(row, scaled, strict=True)}


def path_log_probs(rows: Sequence[dict[int, float]], token_ids: list[int], parents: list[int]) -> list[float]:
    """Log-probability that each row's node is reached; 0 for the root."""
    reach = [0.0]
    for token, parent in zip(token_ids, parents, strict=True):
        reach.append(reach[parent + 1] + rows[parent + 1].get(token, _UNKNOWN))
    return reach


def likeliest_outcomes(
    candidates: RoundCandidates, *, tau: float, budget: int
) -> list[tuple[int, int, float]]:
    """The `budget` likeliest outcomes (node, bonus token, log-probability), best first; the root is -1."""
    rows = [sharpened(row, tau) for row in candidates.rows]
    reach = path_log_probs(rows, candidates.token_ids, candidates.parents)
    outcomes = [
        (reach[index] + log_prob, index - 1, token)
        for index, (row, proposed) in enumerate(zip(rows, candidates.children(), strict=True))
        for token, log_prob in row.items()
        if token not in proposed
    ]
    outcomes.sort(key=lambda outcome: -outcome[0])
    return [(node, token, log_prob) for log_prob, node, token in outcomes[:budget]]


class TauEstimate:
    """The temperature under which the target's past choices were likeliest, of a few."""

    def __init__(self) -> None:
        self._log_likelihood: NDArray[np.float64] = np.zeros(len(_TAUS))

    @property
    def value(self) -> float:
        """1 before anything was seen."""
        if not self._log_likelihood.any():
            return 1.0
        return _TAUS[int(self._log_likelihood.argmax())]

    def add(self, candidates: RoundCandidates, *, accepted_node: int, bonus_token: int) -> None:
        """Learn from what the target chose along the accepted path, the bonus token included."""
        node, token = accepted_node, bonus_token
        while True:
            row = candidates.rows[node + 1]
            if token in row:
                scaled = np.fromiter(row.values(), np.float64) / _TAU_COLUMN
                gains = row[token] / _TAU_COLUMN[:, 0] - np.logaddexp.reduce(scaled, axis=1)
                self._log_likelihood = self._log_likelihood * _DECAY + gains
            if node < 0:
                return
            node, token = candidates.parents[node], candidates.token_ids[node]
