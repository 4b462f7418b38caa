"""How often the target accepts what the draft holds to be likely, learned from outcomes."""

from __future__ import annotations

import math

_MOST_LOGIT = 7.0
_DECAY = 0.998
"""Per observed node."""
_PRIOR = (-0.2, 0.85)
"""A draft is a little too sure of itself."""
_PRIOR_WEIGHT = (4.0, 8.0)
_OFFSETS, _SLOPES = (-6.0, 4.0), (0.1, 2.0)
"""Bounds of the two parameters."""
_MOST_VALUES = 10_000
"""Kept between observations, which may be far apart."""


class Calibration:
    """P(accepted | parent accepted) = sigmoid(offset + slope * logit p), p being the draft's (Platt scaling).

    Fitted by one Newton step for each observed node, with forgetting.
    """

    def __init__(self) -> None:
        self._offset, self._slope = _PRIOR
        self._curvature = [_PRIOR_WEIGHT[0], 0.0, _PRIOR_WEIGHT[1]]
        """The symmetric matrix [[a, b], [b, c]]."""
        self._values: dict[float, float] = {}
        """What `log_value` said since the last observation: every step of a draft asks for the same nodes."""

    def log_value(self, log_prob: float) -> float:
        """Log of the probability of acceptance for a token of this log-probability. Rises with it."""
        value = self._values.get(log_prob)
        if value is None:
            if len(self._values) >= _MOST_VALUES:
                self._values.clear()
            value = -_softplus(-(self._offset + self._slope * _logit(log_prob)))
            self._values[log_prob] = value
        return value

    def add(self, log_prob: float, *, is_accepted: bool) -> None:
        """The target reached the parent of such a node, and took it or did not."""
        x = _logit(log_prob)
        predicted = math.exp(self.log_value(log_prob))
        weight = max(predicted * (1 - predicted), 0.02)
        a, b, c = self._curvature
        a = _DECAY * a + (1 - _DECAY) * _PRIOR_WEIGHT[0] + weight
        b = _DECAY * b + weight * x
        c = _DECAY * c + (1 - _DECAY) * _PRIOR_WEIGHT[1] + weight * x * x
        self._curvature = [a, b, c]
        error = is_accepted - predicted
        determinant = a * c - b * b
        self._offset = _clamped(self._offset + (c - b * x) * error / determinant, _OFFSETS)
        self._slope = _clamped(self._slope + (a * x - b) * error / determinant, _SLOPES)
        self._values.clear()


def _logit(log_prob: float) -> float:
    """log(p / (1 - p)) of a log-probability, bounded."""
    if log_prob >= -math.exp(-_MOST_LOGIT):
        return _MOST_LOGIT
    return max(log_prob - math.log(-math.expm1(log_prob)), -_MOST_LOGIT)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _clamped(x: float, bounds: tuple[float, float]) -> float:
    return min(max(x, bounds[0]), bounds[1])
