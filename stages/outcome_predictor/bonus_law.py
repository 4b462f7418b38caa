"""How bonus tokens follow from the draft's law where the target's noise is not the draft's; learned online.

    P(token) ~ weight(token)^(1 / tau) * tail^(token is in the tail)

After a node with no children the weights are the draft's own law. After rejected children they are what is
left of it, and with Saguaro sampling the tokens behind the top F are the tail: the draft was made to draw
from them more often, so less of the target's law is left for them. tau and tail are those of a few values
under which the bonus tokens of the past were likeliest.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from stages.outcome_predictor.calibrated import sharpened

_TAUS = np.exp2(np.arange(-8, 13) / 4)
"""From 1/4 to 8: what is left after a rejection is flat, where the draft was sure and wrong."""
_TAILS = np.exp2(-np.arange(0.0, 9.0))
"""From 1 to 1/256."""
_DECAY = 0.995
"""Per observed token: two hundred of them are remembered."""
_PRIOR = 1.0
"""Log-likelihood that a halving or doubling of tau or tail costs before anything was seen."""


class BonusLaw:
    """tau, and with Saguaro sampling the weight of the tail."""

    def __init__(self, *, saguaro_c: float | None = None) -> None:
        """saguaro_c: C, which the tail's weight is taken to be before anything was seen; None: no tail."""
        self._tails = _TAILS if saguaro_c is not None else _TAILS[:1]
        expected = 1.0 if saguaro_c is None else max(saguaro_c, float(_TAILS[-1]))
        tau_distance = np.abs(np.log2(_TAUS))[:, None]
        tail_distance = np.abs(np.log2(self._tails / expected))[None]
        self._log_likelihood: NDArray[np.float64] = -_PRIOR * (tau_distance + tail_distance)
        """[taus, tails]"""

    @property
    def tau(self) -> float:
        """The likeliest; 1 before anything was seen."""
        return float(_TAUS[self._best()[0]])

    @property
    def tail(self) -> float:
        """The likeliest; next to C before anything was seen."""
        return float(self._tails[self._best()[1]])

    def log_probs(self, weights: NDArray[np.float64], is_tail: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Log-probabilities [rows, width]; each row sums to 1 over what may follow.

        weights: [rows, width] log weights, -inf for what cannot follow. is_tail: [rows, width].
        """
        found = sharpened(weights + self.tau * math.log(self.tail) * is_tail, self.tau)
        found[weights == -np.inf] = -np.inf
        return found

    def add(self, weights: NDArray[np.float64], is_tail: NDArray[np.bool_], column: int) -> None:
        """Learn that the token of this column followed. weights, is_tail: [width] of its row."""
        if weights[column] == -np.inf:
            return  # it was held to be impossible, and says nothing about the others
        scaled = (weights / _TAUS[:, None])[:, None, :]
        scaled = scaled + is_tail * np.log(self._tails)[None, :, None]
        gains = scaled[..., column] - np.logaddexp.reduce(scaled, axis=2)
        self._log_likelihood = self._log_likelihood * _DECAY + gains

    def _best(self) -> tuple[int, int]:
        tau, tail = divmod(int(self._log_likelihood.argmax()), len(self._tails))
        return tau, tail
