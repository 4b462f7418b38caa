"""The law of bonus tokens under the rejection rule, as it is learned."""

from __future__ import annotations

import numpy as np
import pytest

from stages.outcome_predictor.bonus_law import BonusLaw

WEIGHTS = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
TAIL = np.array([False, False, True, True])


def _observe(law: BonusLaw, probs: np.ndarray, *, count: int = 400) -> None:
    random = np.random.default_rng(1)
    for column in random.choice(len(probs), size=count, p=probs / probs.sum()):
        law.add(WEIGHTS, TAIL, int(column))


def test_before_anything_was_seen_the_draft_and_c_are_believed() -> None:
    assert (BonusLaw().tau, BonusLaw().tail) == (1.0, 1.0)
    assert (BonusLaw(saguaro_c=0.25).tau, BonusLaw(saguaro_c=0.25).tail) == (1.0, 0.25)
    assert BonusLaw(saguaro_c=0.0).tail == pytest.approx(1 / 256)
    (row,) = np.exp(BonusLaw(saguaro_c=0.5).log_probs(WEIGHTS[None], TAIL[None]))
    assert row == pytest.approx(np.array([0.4, 0.3, 0.1, 0.05]) / 0.85)


@pytest.mark.parametrize(("tau", "tail"), [(1.0, 1.0), (2.0, 0.25), (0.5, 0.5), (1.0, 1 / 32)])
def test_sharpness_and_tail_are_found_again(tau: float, tail: float) -> None:
    law = BonusLaw(saguaro_c=1.0)
    true = np.exp(WEIGHTS / tau) * np.where(TAIL, tail, 1.0)
    _observe(law, true, count=2000)
    (found,) = np.exp(law.log_probs(WEIGHTS[None], TAIL[None]))
    assert found == pytest.approx(true / true.sum(), abs=0.08)


def test_without_saguaro_sampling_there_is_no_tail_to_learn() -> None:
    law = BonusLaw()
    _observe(law, np.array([0.5, 0.5, 0.0, 0.0]))
    assert law.tail == 1.0


def test_what_cannot_follow_has_no_probability_and_teaches_nothing() -> None:
    law, weights = BonusLaw(), WEIGHTS.copy()
    weights[0] = -np.inf
    (row,) = np.exp(law.log_probs(weights[None], TAIL[None]))
    assert row == pytest.approx(np.array([0.0, 3, 2, 1]) / 6)
    for _ in range(100):
        law.add(weights, TAIL, 0)
    assert law.tau == 1.0
    nothing = law.log_probs(np.full((1, 4), -np.inf), TAIL[None])
    assert (nothing == -np.inf).all()
