"""Outcome probabilities under the rejection rule."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conf.schema import FanOut, SpeculationConfig, TreeConfig, Verification
from pipeline.messages import Outcome
from stages.outcome_predictor.candidates import RoundCandidates
from stages.outcome_predictor.drawn import DrawnOutcomes, TryEstimate

ROWS = np.log(np.tile(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32), (3, 1)))


def _round(round_id: int, token_ids: list[int], parents: list[int]) -> RoundCandidates:
    """The draft gives the tokens 0 to 3 falling probabilities, everywhere."""
    ids = np.tile(np.arange(4, dtype=np.int32), (3, 1))
    return RoundCandidates.of(
        round_id=round_id, token_ids=token_ids, parents=parents, ids=ids, log_probs=ROWS
    )


def _outcomes(*, c: float | None = None, widths: list[int] | None = None, budget: int = 6) -> DrawnOutcomes:
    return DrawnOutcomes(
        SpeculationConfig(
            prepare_outcomes=True,
            verification=Verification.rejection,
            saguaro_c=c,
            budget=budget,
            depth=2,
            fan_out=FanOut.uniform,
            tree=TreeConfig(widths=widths),
        )
    )


def _chain(round_id: int = 1) -> RoundCandidates:
    """Token 0 after the root, token 1 after it."""
    return _round(round_id, [0, 1], [-1, 0])


def _outcome(*, accepted_node: int, bonus_token: int, round_id: int = 1) -> Outcome:
    return Outcome(
        request_id="r",
        round_id=round_id,
        committed_len=9,
        accepted_node=accepted_node,
        bonus_token=bonus_token,
        num_accepted=accepted_node + 1,
        num_proposed=2,
        num_rows=3,
        compute_ns=1,
        decided_ns=1,
    )


def test_outcomes_are_never_proposed_children_and_add_up_to_no_more_than_one() -> None:
    drawn = _outcomes(budget=99)
    drawn.begin("r", _chain())
    outcomes = drawn.likeliest("r", budget=99)
    assert (-1, 0) not in {(node, token) for node, token, _ in outcomes}
    assert sum(math.exp(log_prob) for _, _, log_prob in outcomes) == pytest.approx(1.0)
    # Nothing was learned yet: a child is accepted with 0.6, and the rest has the draft's proportions.
    best = {(node, token): log_prob for node, token, log_prob in outcomes}
    assert math.exp(best[-1, 1]) == pytest.approx(0.4 * 0.5)
    assert math.exp(best[1, 0]) == pytest.approx(0.36 * 0.5)


def test_siblings_are_tried_in_turn() -> None:
    drawn = _outcomes(widths=[2], budget=99)
    tree = _round(1, [0, 1], [-1, -1])
    assert [math.exp(reach) for reach in drawn.reach(tree)] == pytest.approx([1.0, 0.6, 0.4 * 0.6])
    drawn.begin("r", tree)
    below_root = [math.exp(p) for node, _, p in drawn.likeliest("r", budget=99) if node == -1]
    assert sum(below_root) == pytest.approx(0.16)


def test_acceptance_is_learned_by_what_the_draft_gave_the_child() -> None:
    estimate = TryEstimate()
    for _ in range(300):
        estimate.add(math.log(0.9), 0, was_accepted=True)
        estimate.add(math.log(0.05), 0, was_accepted=False)
    assert estimate.value(math.log(0.8), 0) > 0.95
    assert estimate.value(math.log(0.04), 0) < 0.05
    assert estimate.value(math.log(0.04), 1) == pytest.approx(0.6)  # a second sibling is another matter


def test_outcomes_that_keep_coming_become_likelier() -> None:
    drawn = _outcomes()
    for round_id in range(60):
        drawn.begin("r", _chain(round_id))
        drawn.learn(_outcome(accepted_node=-1, bonus_token=2, round_id=round_id))
    drawn.begin("r", _chain())
    assert drawn.likeliest("r", budget=99)[0][0] == -1
    assert math.exp(drawn.reach(_chain())[1]) < 0.1


def test_a_small_c_puts_the_residual_on_the_top_tokens() -> None:
    drawn = _outcomes(c=0.0, budget=6)
    assert drawn.announce("r", budget=3, acceptance=0.5, power=1.0) == [1, 1, 1]
    assert drawn.announce("r", budget=6, acceptance=0.5, power=1.0) == [2, 2, 2]
    drawn.begin("r", _chain())
    outcomes = {(node, token): math.exp(p) for node, token, p in drawn.likeliest("r", budget=99)}
    # After the root token 0 is tried, so of the top two only token 1 can be left; after the leaf nothing is.
    assert outcomes[-1, 1] == pytest.approx(0.4, rel=1e-2)
    assert outcomes[1, 0] == pytest.approx(0.36 * 0.5)


def test_shares_of_a_round_follow_from_what_was_announced_for_it() -> None:
    drawn = _outcomes(c=0.5)
    assert drawn.announced_acceptance("r", 0.3) == 0.3
    drawn.announce("r", budget=6, acceptance=0.7, power=1.0)
    assert drawn.announced_acceptance("r", 0.3) == 0.7
    drawn.forget("r")
    assert drawn.announced_acceptance("r", 0.3) == 0.3


def test_nothing_is_announced_without_saguaro_sampling() -> None:
    assert _outcomes().announce("r", budget=6, acceptance=0.7, power=1.0) == []


def test_an_outcome_of_another_round_teaches_nothing() -> None:
    drawn = _outcomes()
    drawn.begin("r", _chain(round_id=4))
    assert not drawn.learn(_outcome(accepted_node=-1, bonus_token=2, round_id=5))
    assert drawn.reach(_chain())[1] == pytest.approx(math.log(0.6))


def test_an_outcome_may_come_after_the_candidates_of_the_next_round() -> None:
    """As it does in a batch: the verifier tells the predictor last, when all proposals are there."""
    early, late = _outcomes(), _outcomes()
    for round_id in range(40):
        early.begin("r", _chain(round_id))
        assert early.learn(_outcome(accepted_node=-1, bonus_token=2, round_id=round_id))
        late.begin("r", _chain(round_id))
        if round_id:
            assert late.learn(_outcome(accepted_node=-1, bonus_token=2, round_id=round_id - 1))
    learned = [math.exp(drawn.reach(_chain())[1]) for drawn in (early, late)]
    assert max(learned) < 0.1


def test_nothing_grows_with_requests_that_end_before_their_last_candidates_come() -> None:
    drawn = _outcomes(c=0.5)
    for number in range(50):
        name = f"request {number}"
        drawn.forget(name)
        drawn.begin(name, _chain())
        drawn.announce(name, budget=6, acceptance=0.5, power=1.0)
    assert len(drawn._rounds) + len(drawn._announced) <= 4
