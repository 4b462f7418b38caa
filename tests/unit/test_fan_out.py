"""Sharing the branch budget, against the paper's formula and by hand."""

from __future__ import annotations

import math

import pytest

from conf.schema import FanOut
from pipeline.messages import Outcome
from stages.outcome_predictor.acceptance import AcceptanceEstimate
from stages.outcome_predictor.fan_out import Nodes, choose_outcomes, fan_outs, reach_weights, round_to_budget


def test_geometric_shares_are_those_of_theorem_12() -> None:
    """a = 0.8, r = 1, K = 7, B = 24, worked out from the formula."""
    weights = reach_weights(Nodes.chain(7), acceptance=0.8, power=1.0)
    shares = [w * 24 / sum(weights) for w in weights]
    expected = [3.9, 3.5, 3.1, 2.8, 2.5, 2.2, 2.0, 4.0]
    assert [round(share, 1) for share in shares] == expected


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("policy", [FanOut.uniform, FanOut.geometric])
@pytest.mark.parametrize("depth", [0, 1, 7])
def test_shares_sum_to_the_budget(policy: FanOut, depth: int, acceptance: float) -> None:
    counts = fan_outs(policy, Nodes.chain(depth), budget=17, acceptance=acceptance, power=1.0)
    assert sum(counts) == 17
    assert min(counts) >= 0


def test_rounding_takes_the_largest_remainders() -> None:
    assert round_to_budget([1.0, 1.0, 1.0], 4) == [2, 1, 1]
    assert round_to_budget([0.5, 0.3, 0.2], 5) == [3, 1, 1]


def test_a_node_without_candidates_passes_its_share_on() -> None:
    outcomes = choose_outcomes([[], [4], [7, 8, 9]], [2, 2, 1], Nodes.chain(2), acceptance=0.5, power=1.0)
    assert sorted(o[:2] for o in outcomes) == [(0, 4), (1, 7), (1, 8), (1, 9)]


def test_outcomes_come_in_order_of_probability() -> None:
    """a = 0.5, K = 1: stopping at the root and at the node are equally likely; second choices are rarer."""
    outcomes = choose_outcomes([[1, 2], [3, 4]], [2, 2], Nodes.chain(1), acceptance=0.5, power=1.0)
    assert [o[:2] for o in outcomes] == [(-1, 1), (0, 3), (-1, 2), (0, 4)]
    certain = choose_outcomes([[1, 2], [3, 4]], [2, 2], Nodes.chain(1), acceptance=0.95, power=1.0)
    assert [o[:2] for o in certain] == [(0, 3), (0, 4), (-1, 1), (-1, 2)]


def test_a_level_of_a_tree_shares_what_its_depth_has_on_a_chain() -> None:
    """Root with two children, reached with 0.6 and 0.2; the likelier one has a child."""
    nodes = Nodes.tree([-1, -1, 0], [0.0, math.log(0.6), math.log(0.2), math.log(0.5)])
    assert nodes.depths == [0, 1, 1, 2]
    assert nodes.is_leaf == [False, False, True, True]
    assert nodes.shares == pytest.approx([1.0, 0.75, 0.25, 1.0])
    chain = reach_weights(Nodes.chain(2), acceptance=0.5, power=1.0)
    tree = reach_weights(nodes, acceptance=0.5, power=1.0)
    assert tree == pytest.approx([chain[0], 0.75 * chain[1], 0.25 * chain[1] * 2**0.5, chain[2]])


def _outcome(num_accepted: int, num_proposed: int) -> Outcome:
    return Outcome(
        request_id="r",
        round_id=1,
        committed_len=9,
        accepted_node=num_accepted - 1,
        bonus_token=1,
        num_accepted=num_accepted,
        num_proposed=num_proposed,
    )


def test_acceptance_is_learned_from_outcomes_and_follows_a_change() -> None:
    estimate = AcceptanceEstimate()
    for _ in range(300):
        estimate.add(_outcome(3, 4))  # three successes, one failure
    assert estimate.value == pytest.approx(0.75, abs=0.02)
    for _ in range(300):
        estimate.add(_outcome(0, 4))
    assert estimate.value < 0.1


def test_a_fully_accepted_proposal_counts_no_failure_and_an_empty_one_nothing() -> None:
    estimate = AcceptanceEstimate()
    before = estimate.value
    estimate.add(_outcome(0, 0))
    assert estimate.value == before
    for _ in range(500):
        estimate.add(_outcome(4, 4))
    assert 0.97 < estimate.value < 1
