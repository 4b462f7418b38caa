"""What the planner makes of the figures: how much is drafted, verified and prepared."""

from __future__ import annotations

import math

import pytest

from stages.draft_speculator.growth import Entry
from stages.draft_speculator.measures import Delays, Measures, Way
from stages.draft_speculator.ngram_draft import LookedUp
from tests.unit.planning import MS, measured, online_planner


def test_proposals_are_cut_where_the_next_group_of_rows_begins() -> None:
    measures = measured()
    for _ in range(20):
        for rows in (1, 4, 6, 7, 9, 11):
            measures.target.add(rows, (22 if rows <= 6 else 44) * MS)
    # The root takes a row. Five more are nearly free, a sixth costs 22 ms, or 1.8 tokens.
    chain = _chain(0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
    assert len(online_planner(measures).keep(chain, other_rows=0)) == 5
    assert len(online_planner(measures).keep(_chain(0.9, 0.8, 0.3, 0.1), other_rows=3)) == 2


def _chain(*probs: float) -> list[Entry]:
    """Entries whose path values are these."""
    return [Entry(i - 1, i, 0.0, math.log(p), i + 1, None) for i, p in enumerate(probs)]


def test_nodes_are_kept_while_they_are_worth_a_row() -> None:
    # 2 tokens in 25 ms: half a ms is worth 0.04 tokens.
    planner = online_planner(measured())
    assert len(planner.keep(_chain(0.8, 0.3, 0.05, 0.03, 0.01), other_rows=0)) == 3
    assert len(online_planner(measured(row=4.0)).keep(_chain(0.8, 0.5, 0.2, 0.1), other_rows=0)) == 2


def test_what_stays_keeps_its_parents() -> None:
    entries = [
        Entry(-1, 5, 0.0, math.log(0.02), 1, None),
        Entry(0, 6, 0.0, math.log(0.01), 2, None),
        Entry(-1, 7, 0.0, math.log(0.5), 1, None),
        Entry(2, 8, 0.0, math.log(0.4), 2, None),
    ]
    kept = online_planner(measured(), nodes=8).keep(entries, other_rows=0)
    assert [(entry.parent, entry.token_id) for entry in kept] == [(-1, 7), (0, 8)]


def test_steps_that_the_target_waits_for_must_win_more_than_they_cost() -> None:
    cheap, dear = online_planner(measured(step=1.0)), online_planner(measured(step=8.0))
    assert cheap.waiting_reads([[0.0]]) == [1]
    assert cheap.waiting_reads([[math.log(0.5)]]) == [1]
    assert dear.waiting_reads([[math.log(0.5)]]) == [0]


def test_all_waiting_requests_count_in_the_price() -> None:
    measures = measured(step=3.0, row=0.1)
    assert online_planner(measures).pays_to_wait([[]])
    measures.num_active = 8
    for _ in range(40):
        measures.add_round(tokens=2, ns=25 * MS, way=Way.PREPARED)
    assert not online_planner(measures).pays_to_wait([[]])
    assert online_planner(measures).pays_to_wait([[]] * 8), "a step that serves all of them"


def test_after_a_miss_the_draft_rests_where_looking_up_promises_more() -> None:
    measures = measured(step=5.0)
    planner = online_planner(measures)
    chain = [LookedUp(token, 4) for token in (7, 8, 9)]
    for _ in range(50):
        measures.look_up[4].add(False)
    assert planner.pays_to_wait([chain])
    for _ in range(500):
        measures.look_up[4].add(True)
    assert not planner.pays_to_wait([chain])


def test_no_branch_step_is_begun_that_keeps_the_target_waiting_for_little() -> None:
    planner = online_planner(measured(step=3.0), rows=8, nodes=8)
    unlikely = [math.log(0.05)] * 4
    assert planner.branch_reads([unlikely], left_ns=10 * MS)[0] > 0
    assert planner.branch_reads([unlikely], left_ns=0.0) == [0]
    assert planner.branch_reads([[math.log(0.9)]], left_ns=0.0) == [1]


def test_an_overdue_outcome_is_expected_as_past_ones_came() -> None:
    planner = online_planner(measured(step=3.0), rows=8, nodes=8)
    unlikely = [math.log(0.05)] * 4
    for delay in (-1.0, 0.0, 10.0, 12.0):
        planner.measures.delays.add(delay * MS)
    # One ms after it was expected only the late ones are possible, and there is time for a step; at 20 none.
    assert planner.branch_reads([unlikely], left_ns=-1 * MS)[0] > 0
    assert planner.branch_reads([unlikely], left_ns=-20 * MS) == [0]


def test_how_late_a_step_ends_is_the_mean_over_past_delays() -> None:
    delays = Delays()
    assert delays.late_ns([3.0, 5.0], left_ns=4.0) == [0.0, 1.0]
    for delay in (-2.0, 0.0, 2.0):
        delays.add(delay)
    assert delays.late_ns([3.0, 5.0], left_ns=4.0) == pytest.approx([1 / 3, 4 / 3])
    assert delays.late_ns([3.0], left_ns=-2.0) == [3.0]


def test_looked_up_tokens_are_kept_while_they_are_worth_a_row() -> None:
    measures = measured(row=4.0)
    planner = online_planner(measures)
    chain = [LookedUp(7, 4), LookedUp(8, 4), LookedUp(9, 1)]
    for _ in range(50):
        measures.look_up[4].add(True)
        measures.look_up[1].add(False)
    assert planner.keep_looked_up(chain) == chain[:2]


def test_branches_are_no_more_than_there_is_time_for() -> None:
    assert online_planner(measured(step=20.0)).num_branches() == 4
    assert online_planner(measured(step=0.2)).num_branches() == 24


def test_nothing_is_planned_before_there_are_figures() -> None:
    planner = online_planner(Measures(), rows=4, nodes=8)
    entries = _chain(0.8, 0.001)
    assert planner.keep(entries, other_rows=0) == entries
    assert planner.num_branches() == 24
    assert planner.waiting_reads([[math.log(0.5), math.log(0.1)]]) == [1]
    assert planner.rest_rounds() == 0
    assert planner.figures() is None
