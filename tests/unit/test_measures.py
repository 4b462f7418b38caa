"""What the speculator measures: times, how often the draft is right, speeds."""

from __future__ import annotations

import math
import random

import pytest

from stages.draft_speculator.calibration import Calibration
from stages.draft_speculator.measures import Promises, Rate, Ratio
from stages.draft_speculator.time_model import TimeModel
from tests.unit.planning import MS, time_model


def test_times_are_fitted_to_base_and_slope() -> None:
    model = time_model(20, 0.5, noise=0.03)
    assert model.slope_ns / MS == pytest.approx(0.5, rel=0.2)
    assert model.predict_ns(1) / MS == pytest.approx(20.5, rel=0.02)
    assert model.predict_ns(30) / MS == pytest.approx(35, rel=0.1)


def test_equal_row_counts_leave_the_slope_near_its_prior() -> None:
    model = time_model(20, 0.5, rows=range(6, 7))
    assert model.predict_ns(6) / MS == pytest.approx(23)
    assert model.slope_ns / MS == pytest.approx(0.02 * 23, rel=0.01)


def test_one_slow_forward_does_not_upset_the_fit() -> None:
    model = time_model(20, 0.5)
    model.add(1, 2000 * MS)
    assert model.predict_ns(1) / MS < 24, "20.5 before"


def test_times_that_rise_in_steps_are_learned_row_by_row() -> None:
    """Rows come in groups of six: up to six take 30 ms, up to twelve take 60."""
    model = TimeModel()
    for _ in range(20):
        for rows in (3, 5, 6, 7, 9, 11):
            model.add(rows, (30 if rows <= 6 else 60) * MS)
    assert model.predict_ns(6) / MS == pytest.approx(30, abs=4)
    assert model.predict_ns(7) / MS == pytest.approx(60, abs=4)


def test_a_steep_slope_never_predicts_a_forward_of_no_time() -> None:
    model = time_model(-30, 10, rows=range(6, 9))
    assert model.predict_ns(1) > 0


@pytest.mark.parametrize(("offset", "slope"), [(-1.0, 0.6), (0.0, 1.0), (0.5, 1.3)])
def test_calibration_finds_how_often_the_draft_is_right(offset: float, slope: float) -> None:
    draw, calibration = random.Random(1), Calibration()

    def truth(p: float) -> float:
        return 1 / (1 + math.exp(-offset - slope * math.log(p / (1 - p))))

    for _ in range(3000):
        p = draw.uniform(0.01, 0.99)
        calibration.add(math.log(p), is_accepted=draw.random() < truth(p))
    for p in (0.1, 0.5, 0.9):
        assert math.exp(calibration.log_value(math.log(p))) == pytest.approx(truth(p), abs=0.08)


@pytest.mark.parametrize("log_prob", [0.0, -1e-300, -1e-12, -50.0, -math.inf])
def test_calibration_takes_every_log_probability(log_prob: float) -> None:
    calibration = Calibration()
    for is_accepted in (True, False):
        calibration.add(log_prob, is_accepted=is_accepted)
    assert -20 < calibration.log_value(log_prob) <= 0


def test_calibration_has_nothing_to_say_of_before_an_observation() -> None:
    calibration, log_prob = Calibration(), math.log(0.4)
    values = [calibration.log_value(log_prob)]
    for _ in range(3):
        calibration.add(log_prob, is_accepted=False)
        values.append(calibration.log_value(log_prob))
    assert values == sorted(set(values), reverse=True)
    assert calibration.log_value(math.log(0.3)) < values[-1] < calibration.log_value(math.log(0.5))


def test_calibration_learns_of_a_draft_that_is_never_right() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.add(math.log(0.9), is_accepted=False)
    assert math.exp(calibration.log_value(math.log(0.9))) < 0.2


def test_a_rate_forgets_and_is_not_upset_by_one_long_round() -> None:
    rate = Rate()
    for _ in range(200):
        rate.add(1, 10.0)
    for _ in range(200):
        rate.add(2, 10.0)
    assert rate.value == pytest.approx(0.2, rel=0.01)
    rate.add(2, 1e9)
    assert rate.value > 0.15


def test_a_ratio_starts_at_its_prior() -> None:
    ratio = Ratio(0.3)
    assert ratio.value == pytest.approx(0.3)
    for _ in range(500):
        ratio.add(True)
    assert 0.9 < ratio.value < 1


def test_promises_are_held_to_be_kept_as_often_as_they_were_and_rests_are_no_evidence() -> None:
    promises = Promises()
    assert promises.settle(accepted=3, promised=2.0) == pytest.approx(2.0, abs=0.1), "one round is luck"
    for _ in range(400):
        half_kept = promises.settle(accepted=1, promised=2.0)
    assert half_kept == pytest.approx(1.0, rel=0.2)
    for _ in range(500):
        assert promises.settle(accepted=0, promised=0.0) == 0.0
    assert promises.settle(accepted=1, promised=2.0) == pytest.approx(half_kept, rel=1e-3)
