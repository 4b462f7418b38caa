"""The power law of the miss rate: recovered from ranks that were drawn from a known one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stages.outcome_predictor.power_law import (
    PowerLaw,
    PowerLawEstimate,
    fit_power_law,
    miss_rates,
)

MAX_RANK = 24


def _draw_ranks(law: PowerLaw, count: int) -> list[int]:
    """Ranks with P(rank > F) = A * F^-r for F >= 1."""
    uniform = np.random.default_rng(3).random(count)
    return [math.ceil(max(1.0, (law.scale / u) ** (1 / law.power))) for u in uniform]


def _count(ranks: list[int]) -> np.ndarray:
    counts = np.zeros(MAX_RANK + 1)
    for rank in ranks:
        counts[min(rank, MAX_RANK + 1) - 1] += 1
    return counts


def test_miss_rates_are_the_tail_of_the_ranks() -> None:
    assert miss_rates(np.array([5.0, 2.0, 0.0, 3.0])).tolist() == [0.5, 0.3, 0.3]


@pytest.mark.parametrize("power", [0.3, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("scale", [0.3, 0.9])
def test_the_fit_recovers_a_known_law(scale: float, power: float) -> None:
    """4000 ranks, one fixed draw: exponent and scale within a tenth (and 0.03) of themselves."""
    law = fit_power_law(_count(_draw_ranks(PowerLaw(scale=scale, power=power), 4000)))
    assert law.power == pytest.approx(power, rel=0.1, abs=0.03)
    assert law.scale == pytest.approx(scale, rel=0.1)


@pytest.mark.parametrize("power", [0.4, 1.4])
def test_the_estimate_starts_at_one_and_follows_the_ranks(power: float) -> None:
    estimate = PowerLawEstimate(MAX_RANK)
    assert estimate.power == 1.0
    ranks = _draw_ranks(PowerLaw(scale=0.7, power=power), 600)
    for rank in ranks[:4]:
        estimate.add(rank)
    assert abs(estimate.power - 1.0) < 0.7 * abs(power - 1.0)  # the prior holds on
    for rank in ranks[4:]:
        estimate.add(rank)
    assert estimate.power == pytest.approx(power, abs=0.6 * abs(power - 1.0))


def test_an_estimate_forgets_a_law_that_no_longer_holds() -> None:
    estimate = PowerLawEstimate(MAX_RANK)
    for power in (1.5, 0.4):
        for rank in _draw_ranks(PowerLaw(scale=0.8, power=power), 1500):
            estimate.add(rank)
        assert estimate.power == pytest.approx(power, rel=0.2)


def test_an_estimate_may_start_where_another_one_stands() -> None:
    assert PowerLawEstimate(MAX_RANK, start=0.5).power == 0.5


@pytest.mark.parametrize("rank", [1, MAX_RANK, MAX_RANK + 9, None])
def test_outcomes_that_are_all_alike_give_a_finite_positive_exponent(rank: int | None) -> None:
    estimate = PowerLawEstimate(MAX_RANK)
    for _ in range(2000):
        estimate.add(rank)
    assert 0 < estimate.power < 20


def test_a_budget_of_one_is_no_curve_and_keeps_the_prior() -> None:
    estimate = PowerLawEstimate(1)
    estimate.add(None)
    estimate.add(1)
    assert estimate.power == 1.0


def test_a_miss_rate_is_never_more_than_certain() -> None:
    assert PowerLaw(scale=2.0, power=1.0).miss_rate(1) == 1.0
    assert PowerLaw(scale=2.0, power=1.0).miss_rate(4) == 0.5
