"""How long a forward of n rows takes, learned from the forwards that were run."""

from __future__ import annotations

_DECAY = 0.97
"""Per forward: the last thirty or so count, as contexts grow and other programs come and go."""
_SLOPE_WEIGHT = 1.0
"""How firmly the slope holds on to its prior, in rows squared: all forwards may have had the same rows."""
_PRIOR_SLOPE = 0.02
"""Of the mean time, a row: a few rows more are nearly free where reading the weights takes the time."""
_OUTLIER = 2.0
"""A forward that took this many times what was expected tells of the machine, not of its rows."""
_LEAST = 0.2
"""Of the mean time: no forward is faster, whatever a slope from few rows says."""
_SURE_AFTER = 4
_STEP_WEIGHT = 3.0
"""Forwards of a row count after which it counts half by itself and half by the line."""


class TimeModel:
    """T(n) = base + slope * n + step(n), times in ns.

    The line is fitted by least squares with forgetting. The steps are what is left of it for each n: kernels
    take rows in groups, so that one row more may cost nothing, or as much as all before it.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._ns = 0.0
        """Weighted means."""
        self._rows_rows = self._rows_ns = 0.0
        """Weighted means of the products."""
        self._count = 0
        self._steps: dict[int, tuple[float, float]] = {}
        """rows -> (weight, weighted mean of what the line misses)."""
        self._predicted: dict[int, float] = {}
        """rows -> what `predict_ns` said, until the next forward is added."""

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to go by."""
        return self._count >= _SURE_AFTER

    @property
    def slope_ns(self) -> float:
        """Of one row more, on the line; never negative."""
        variance = self._rows_rows - self._rows**2
        covariance = self._rows_ns - self._rows * self._ns
        prior = _PRIOR_SLOPE * self._ns
        return max((covariance + _SLOPE_WEIGHT * prior) / (variance + _SLOPE_WEIGHT), 0.0)

    def predict_ns(self, rows: int) -> float:
        """Expected time of `rows` rows; 0 before anything was seen."""
        predicted = self._predicted.get(rows)
        if predicted is None:
            weight, step = self._steps.get(rows, (0.0, 0.0))
            expected = self._on_line_ns(rows) + step * weight / (weight + _STEP_WEIGHT)
            predicted = self._predicted[rows] = max(expected, _LEAST * self._ns)
        return predicted

    def predict_up_to(self, rows: int, *, beside: int = 0) -> list[float]:
        """`predict_ns` of 1, 2, ... `rows` rows, each time beside so many others."""
        return [self.predict_ns(count) for count in range(beside + 1, beside + rows + 1)]

    def _on_line_ns(self, rows: float) -> float:
        return self._ns + self.slope_ns * (rows - self._rows)

    def add(self, rows: int, ns: float) -> None:
        """A forward of `rows` rows took `ns`."""
        if self.is_known:
            ns = min(ns, _OUTLIER * self.predict_ns(rows))
        self._predicted.clear()
        self._count += 1
        self._weight = self._weight * _DECAY + 1
        share = 1 / self._weight
        self._rows += (rows - self._rows) * share
        self._ns += (ns - self._ns) * share
        self._rows_rows += (rows * rows - self._rows_rows) * share
        self._rows_ns += (rows * ns - self._rows_ns) * share
        weight, step = self._steps.get(rows, (0.0, 0.0))
        weight = weight * _DECAY + 1
        self._steps[rows] = (weight, step + (ns - self._on_line_ns(rows) - step) / weight)
