"""How the miss rate falls in the fan-out: A * F^-r, fitted online to the ranks of past bonus tokens.

A bonus token of rank f (1 is the likeliest token that is not a proposed child) is missed by every fan-out
smaller than f. So the ranks of past rounds give the whole curve, whatever was prepared in them.
Source: arXiv 2603.03251, Definition 11 (power-law cache hits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DECAY = 0.995
"""Per outcome: two hundred of them are remembered."""
_PRIOR_WEIGHT = 20.0
"""How firmly a new estimate holds on to the exponent it started with: as ten outcomes or so would."""
_LEAST_POWER = 0.05
"""A miss rate that does not fall at all is a small sample, or a draft that is never right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLaw:
    """Miss rate `scale * F^-power` at fan-out F."""

    scale: float
    """A."""
    power: float
    """r."""

    def miss_rate(self, fan_out: float) -> float:
        """At most 1."""
        return min(1.0, self.scale * math.pow(fan_out, -self.power))


def miss_rates(rank_counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of bonus tokens that fan-outs of 1, 2, ... would have missed.

    rank_counts: [F + 1]; entry i counts those of rank i + 1, the last one all that are beyond.
    Returns [F].
    """
    missed = rank_counts[::-1].cumsum()[::-1]
    rates: NDArray[np.float64] = missed[1:] / missed[0]
    return rates


def fit_power_law(
    rank_counts: NDArray[np.float64], *, prior_power: float = 1.0, prior_weight: float = 0.0
) -> PowerLaw:
    """Least squares of log miss rate on log F.

    rank_counts: as `miss_rates` takes them, at least one outcome in all, unless there is a prior.
    prior_power, prior_weight: r is drawn towards `prior_power` as if by the so weighted observation of it.

    A rate of p from n outcomes counts n * p / (1 - p), the inverse variance of its logarithm, and 1 / F of
    that: log F is to be covered evenly, and the large ones are many.
    """
    num_outcomes = float(rank_counts.sum())
    fan_outs = np.arange(1, len(rank_counts))
    missed = rank_counts[::-1].cumsum()[::-1][1:]
    rates = (missed + 0.5) / (num_outcomes + 1)  # never 0 or 1
    weights = num_outcomes * rates / (1 - rates) / fan_outs
    total = weights.sum()
    if total <= 0:
        return PowerLaw(scale=1.0, power=prior_power)
    x, y = np.log(fan_outs), np.log(rates)
    mean_x, mean_y = (weights * x).sum() / total, (weights * y).sum() / total
    spread = (weights * (x - mean_x) ** 2).sum() + prior_weight
    slope = (weights * (x - mean_x) * (y - mean_y)).sum() - prior_weight * prior_power
    power = max(-float(slope / spread), _LEAST_POWER) if spread > 0 else prior_power
    return PowerLaw(scale=math.exp(float(mean_y) + power * float(mean_x)), power=power)


class PowerLawEstimate:
    """The law of recent outcomes."""

    def __init__(self, max_rank: int, *, start: float = 1.0) -> None:
        """max_rank: the largest fan-out of interest. start: r before the first outcome."""
        self._rank_counts = np.zeros(max_rank + 1)
        self._start = start
        self._law: PowerLaw | None = None

    def add(self, rank: int | None) -> None:
        """Count an outcome. rank: of its bonus token, from 1; None if the draft did not name it."""
        index = len(self._rank_counts) - 1 if rank is None else min(rank, len(self._rank_counts)) - 1
        self._rank_counts *= _DECAY
        self._rank_counts[index] += 1
        self._law = None

    @property
    def power(self) -> float:
        """r."""
        if self._law is None:
            self._law = fit_power_law(self._rank_counts, prior_power=self._start, prior_weight=_PRIOR_WEIGHT)
        return self._law.power
