"""Outcome probabilities of one round, from what the draft thinks of every token after every node.

`P(outcome) = P(path to the node accepted) * P(bonus token | node)`, where P is the draft's law under the
shared noise, made softer or sharper by a temperature tau: `p^(1/tau)`, renormalised over the tokens that are
known. tau is fitted online, to what the target chose in earlier rounds. Works on chains and trees alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stages.outcome_predictor.candidates import RoundCandidates

_TAUS = np.exp2(np.arange(-10, 7) / 4)
"""From 0.18 to 2.8."""
_DECAY = 0.995
"""Per observed choice: two hundred of them are remembered."""
_UNKNOWN = math.log(1e-4)
"""Log-probability of a token that the draft did not name."""
_FLOOR = -1e30
"""Below every log-probability; finite, so that a row without candidates makes no NaN."""


def sharpened(log_probs: NDArray[np.float64], tau: float) -> NDArray[np.float64]:
    """Log-probabilities [rows, width] at temperature tau; each row sums to 1 over what it names."""
    scaled = np.maximum(log_probs, _FLOOR) / tau
    peak = scaled.max(axis=1, keepdims=True)
    totals = np.exp(scaled - peak).sum(axis=1, keepdims=True)
    normalised: NDArray[np.float64] = scaled - (peak + np.log(totals))
    return normalised


def path_log_probs(
    log_probs: NDArray[np.float64], parents: Sequence[int], columns: Sequence[int]
) -> list[float]:
    """Log-probability that each row's node is reached; 0 for the root.

    log_probs: [rows, width]; parents, columns: of each node, as in `RoundCandidates`.
    """
    reach = [0.0]
    for parent, column in zip(parents, columns, strict=True):
        step = _UNKNOWN if column < 0 else float(log_probs[parent + 1, column])
        reach.append(reach[parent + 1] + step)
    return reach


def likeliest_outcomes(
    candidates: RoundCandidates, *, tau: float, budget: int
) -> list[tuple[int, int, float]]:
    """The `budget` likeliest outcomes (node, bonus token, log-probability), best first; the root is -1."""
    rows = sharpened(candidates.log_probs, tau)
    reach = path_log_probs(rows, candidates.parents, candidates.columns)
    scores = rows + np.array(reach)[:, None]
    scores[candidates.is_child | (candidates.ids < 0)] = -math.inf
    return best_of(scores, candidates.ids, budget)


def best_of(scores: NDArray[np.float64], ids: NDArray[np.int32], budget: int) -> list[tuple[int, int, float]]:
    """The `budget` best entries (row - 1, token, score) of [rows, width], best first; -inf is never one."""
    width = scores.shape[1]
    order = np.argsort(-scores, axis=None, kind="stable")[:budget]
    return [
        (place // width - 1, token, score)
        for place, token, score in zip(
            order.tolist(), ids.flat[order].tolist(), scores.flat[order].tolist(), strict=True
        )
        if score > -math.inf
    ]


class TauEstimate:
    """The temperature under which the target's past choices were likeliest, of a few."""

    def __init__(self) -> None:
        self._log_likelihood: NDArray[np.float64] = np.zeros(len(_TAUS))

    @property
    def value(self) -> float:
        """1 before anything was seen."""
        if not self._log_likelihood.any():
            return 1.0
        return float(_TAUS[self._log_likelihood.argmax()])

    def add(self, candidates: RoundCandidates, *, accepted_node: int, bonus_token: int) -> None:
        """Learn from what the target chose along the accepted path, the bonus token included."""
        node, column = accepted_node, candidates.column_of(accepted_node + 1, bonus_token)
        while True:
            if column is not None and column >= 0:
                self._add_choice(candidates.log_probs[node + 1], column)
            if node < 0:
                return
            node, column = candidates.parents[node], candidates.columns[node]

    def _add_choice(self, log_probs: NDArray[np.float64], column: int) -> None:
        scaled = log_probs / _TAUS[:, None]
        gains = scaled[:, column] - np.logaddexp.reduce(scaled, axis=1)
        self._log_likelihood = self._log_likelihood * _DECAY + gains
