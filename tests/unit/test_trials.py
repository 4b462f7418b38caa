"""Whether to speculate, and in which way: what is tried, and for how long."""

from __future__ import annotations

import pytest

from stages.draft_speculator.measures import Way
from stages.draft_speculator.planner import OnlinePlanner
from tests.unit.planning import MS, measured, online_planner


def _rest(planner: OnlinePlanner) -> int:
    """How long the planner rests from now on, all of it over."""
    rounds = planner.rest_rounds()
    planner.goes_on_resting(0)
    return rounds


def test_speculation_that_is_slower_than_plain_decoding_rests_ever_longer() -> None:
    # 20.5 ms a plain token; a round of 30 ms that commits one.
    measures = measured(tokens=1, round_ms=30)
    planner = online_planner(measures)
    rests = []
    for _ in range(4):
        rests.append(_rest(planner))
        assert planner.rest_rounds() == 0, "on trial again after a rest"
        for _ in range(8):
            measures.add_round(tokens=1, ns=30 * MS, way=Way.PREPARED)
    assert rests == [8, 32, 128, 256], "it is hopeless"
    for _ in range(60):
        measures.add_round(tokens=3, ns=30 * MS, way=Way.PREPARED)
    assert planner.rest_rounds() == 0
    measures.measure_anew(Way.PREPARED)
    for _ in range(20):
        measures.add_round(tokens=1, ns=30 * MS, way=Way.PREPARED)
    assert planner.rest_rounds() == 8, "it paid in between, so the rests are short again"


def test_speculation_that_pays_does_not_rest() -> None:
    assert online_planner(measured()).rest_rounds() == 0


def test_plain_decoding_is_measured_anew_the_more_seldom_the_more_speculation_pays() -> None:
    waits = []
    for round_ms in (20, 15):  # against 20.5 ms a plain token: 1.025 and 1.37 times as fast
        measures = measured(tokens=1, round_ms=round_ms)
        planner = online_planner(measures)
        num_rounds = 40
        while not (rest := _rest(planner)):
            measures.add_round(tokens=1, ns=round_ms * MS, way=Way.PREPARED)
            num_rounds += 1
        assert rest == 8
        assert planner.rest_rounds() == 0, "one comparison, then it goes on"
        waits.append(num_rounds)
    assert 64 <= waits[0] < 150
    assert 450 < waits[1] < 650


def test_a_machine_on_which_plain_decoding_became_faster_is_noticed() -> None:
    measures = measured(tokens=1, round_ms=20)
    planner = online_planner(measures)
    for _ in range(400):
        if rest := _rest(planner):
            for _ in range(rest):
                measures.add_round(tokens=1, ns=10 * MS, way=Way.PLAIN)
            assert measures.plain_rate == pytest.approx(0.1 / MS)
            break
        measures.add_round(tokens=1, ns=20 * MS, way=Way.PREPARED)
    assert planner.rest_rounds() == 8, "it does not pay any more"


def test_speculation_that_may_only_have_been_unlucky_goes_on() -> None:
    measures = measured(step=20.0, tokens=1, round_ms=21.6, rounds=10)  # 0.95 of plain decoding
    planner = online_planner(measures)
    assert planner.rest_rounds() == 0
    for _ in range(30):
        measures.add_round(tokens=1, ns=21.6 * MS, way=Way.PREPARED)
    assert _rest(planner) == 8, "by now it is no chance"
    for _ in range(20):
        measures.add_round(tokens=1, ns=24 * MS, way=Way.PREPARED)
    assert _rest(planner) == 16, "twice as long, for it is not hopeless"


def test_what_trials_before_showed_counts_in_the_next_and_not_for_ever() -> None:
    measures = measured(tokens=1, round_ms=30)  # 0.68 of plain decoding, seen for long
    planner = online_planner(measures)
    rests = []
    for _ in range(4):
        rests.append(_rest(planner))
        for _ in range(6):  # 1.13 of it
            measures.add_round(tokens=1, ns=18.1 * MS, way=Way.PREPARED)
    assert rests == [8, 32, 128, 0]


def test_what_is_left_of_a_rest_when_a_request_ends_is_for_the_next() -> None:
    measures = measured(step=20.0, round_ms=60)  # drafting after the outcome promises nothing
    planner = online_planner(measures)
    assert planner.rest_rounds() == 8
    planner.goes_on_resting(7)
    planner.goes_on_resting(6)  # the request ends here
    assert planner.rest_rounds() == 6
    measures.num_active = 3
    assert planner.rest_rounds() == 0, "nothing is known of such a batch"
    measures.num_active = 1
    assert _rest(planner) == 6
    assert planner.rest_rounds() == 0, "on trial"


def test_a_lucky_trial_does_not_shorten_the_rests() -> None:
    measures = measured(step=20.0, tokens=1, round_ms=30, rounds=10)
    planner = online_planner(measures)
    rests = []
    for _ in range(4):
        rests.append(_rest(planner))
        for _ in range(6):
            measures.add_round(tokens=2, ns=27 * MS, way=Way.PREPARED)
        assert planner.rest_rounds() == 0, "half as fast again as plain decoding"
        for _ in range(20):
            measures.add_round(tokens=1, ns=30 * MS, way=Way.PREPARED)
    assert rests == [8, 32, 128, 256]


def _share_prepared(planner: OnlinePlanner, rounds: int, *, prepared_ms: float, drafted_ms: float) -> float:
    """Of so many rounds with proposals, 2 tokens each, how many had outcomes prepared."""
    num_prepared = num_speculated = 0
    while num_speculated < rounds:
        for _ in range(_rest(planner)):
            planner.measures.add_round(tokens=1, ns=20.5 * MS, way=Way.PLAIN)
        way, ms = (Way.PREPARED, prepared_ms) if planner.prepares() else (Way.DRAFTED, drafted_ms)
        planner.measures.add_round(tokens=2, ns=ms * MS, way=way)
        num_prepared += planner.prepares()
        num_speculated += 1
    return num_prepared / num_speculated


def test_outcomes_are_prepared_where_that_is_faster_and_not_where_it_is_slower() -> None:
    planner = online_planner(measured(round_ms=36))
    assert _share_prepared(planner, 400, prepared_ms=36, drafted_ms=25) < 0.2
    assert not planner.prepares()
    figures = planner.figures()
    assert figures is not None
    assert figures.num_branches == 0
    assert figures.speculative_tokens_per_second == pytest.approx(2 / 0.025)
    _share_prepared(planner, 1500, prepared_ms=20, drafted_ms=30)
    assert _share_prepared(planner, 400, prepared_ms=20, drafted_ms=30) > 0.9
    figures = planner.figures()
    assert figures is not None
    assert figures.num_branches > 0


def test_what_was_tried_and_is_slower_is_tried_ever_more_seldom() -> None:
    planner = online_planner(measured(round_ms=33))
    # 1.75 tokens in 28 ms are promised, which is more than 2 in 33.
    shares = [_share_prepared(planner, 500, prepared_ms=33, drafted_ms=36) for _ in range(3)]
    assert 0.75 < shares[0] < shares[1] <= shares[2]
    assert shares[2] > 0.95


def test_drafting_after_the_outcome_is_not_tried_where_it_promises_little() -> None:
    measures = measured(step=8.0, row=0.5)
    assert measures.promised_rate(6, step_ns=8 * MS) < measures.of_way(Way.PREPARED).value
    assert _share_prepared(online_planner(measures), 1000, prepared_ms=25, drafted_ms=40) == 1


def test_where_both_ways_are_slower_than_plain_decoding_speculation_rests() -> None:
    measures = measured(round_ms=60)  # by its acceptance, drafting after the outcome looks good
    planner = online_planner(measures)
    num_plain, num_speculated, ways = 0, 0, set()
    for _ in range(60):
        for _ in range(rest := _rest(planner)):
            measures.add_round(tokens=1, ns=20.5 * MS, way=Way.PLAIN)
        num_plain += rest
        num_speculated += 1
        way = Way.PREPARED if planner.prepares() else Way.DRAFTED
        ways.add(way)
        measures.add_round(tokens=2, ns=(60 if way is Way.PREPARED else 66) * MS, way=way)
    assert ways == {Way.PREPARED, Way.DRAFTED}
    assert num_plain > 5 * num_speculated


def test_what_is_promised_is_the_best_depth_of_theorem_7() -> None:
    measures = measured(step=3.0, row=0.5)
    speeds = [
        sum(measures.acceptance**level for level in range(depth + 1))
        / (measures.target.predict_ns(1 + depth) + depth * 3 * MS)
        for depth in range(1, 7)
    ]
    assert measures.promised_rate(6, step_ns=3 * MS) == pytest.approx(max(speeds))
    assert measures.promised_rate(1, step_ns=3 * MS) == pytest.approx(speeds[0])


def test_a_batch_whose_rows_cost_more_than_they_can_win_is_not_tried_at_first() -> None:
    measures = measured(row=4.0)  # a batch of 16: 84 ms, and 148 with a token more for each
    planner = online_planner(measures)
    measures.num_active = 16
    rests = []
    for _ in range(4):
        rests.append(_rest(planner))
        for _ in range(rests[-1]):
            measures.add_round(tokens=1, ns=84 * MS, way=Way.PLAIN)
    assert rests == [8, 32, 128, 0], "in the end it is: the figures may be wrong"
    assert planner.waiting_reads([[0.0]]) == [1], "on trial"
    for _ in range(10):
        measures.add_round(tokens=1, ns=150 * MS, way=Way.DRAFTED)
    assert _rest(planner) == 256


def test_a_single_request_is_tried_whatever_is_promised() -> None:
    planner = online_planner(measured(tokens=1, round_ms=30))
    assert _rest(planner) == 8
    assert planner.rest_rounds() == 0, "looked-up tokens may be right where the draft never is"


def test_in_a_batch_few_rounds_are_enough_for_a_verdict() -> None:
    rests = []
    for num_active in (1, 4):
        measures = measured(step=20.0, row=0.1)
        measures.num_active = num_active
        planner = online_planner(measures)
        measures.measure_anew(Way.PREPARED)
        for _ in range(10):
            ns = measures.target.predict_ns(num_active) / 0.95
            measures.add_round(tokens=1, ns=ns, way=Way.PREPARED)
        rests.append(planner.rest_rounds())
    assert rests == [0, 8]


@pytest.mark.parametrize("prepared_ms", [30, 42])
def test_in_a_batch_the_faster_way_is_found_in_few_rounds(prepared_ms: int) -> None:
    measures = measured(row=0.1)
    planner = online_planner(measures)
    measures.num_active = 16
    is_prepared = []
    for _ in range(120):
        planner.rest_rounds()
        is_prepared.append(planner.prepares())
        way, ms = (Way.PREPARED, prepared_ms) if planner.prepares() else (Way.DRAFTED, 36)
        measures.add_round(tokens=2, ns=ms * MS, way=way)
    num_at_first = is_prepared.index(True)
    assert 60 < num_at_first < 70, "by drafting after the outcome it begins"
    tried, then = is_prepared[num_at_first:][:4], is_prepared[num_at_first:][4:]
    assert all(tried)
    assert set(then) == {prepared_ms < 36}


@pytest.mark.parametrize(("num_active", "rest"), [(1, 0), (4, 1)])
def test_nothing_is_tried_while_prompts_of_others_are_read(num_active: int, rest: int) -> None:
    measures = measured()
    measures.num_active, measures.reads_prompts = num_active, True
    measures.measure_anew(Way.PREPARED)
    planner = online_planner(measures)
    assert _rest(planner) == rest
    for _ in range(12):
        measures.add_round(tokens=2, ns=20 * MS, way=Way.PREPARED)
    assert _rest(planner) == 0, "it was found to pay"


def test_preparing_is_tried_in_a_large_batch_though_drafting_after_the_outcome_loses() -> None:
    measures = measured(row=0.1)
    measures.num_active = 16
    planner, num_rounds = online_planner(measures), 0
    while not planner.prepares():
        for _ in range(rest := _rest(planner)):
            measures.add_round(tokens=1, ns=21.6 * MS, way=Way.PLAIN)
        measures.add_round(tokens=2, ns=48 * MS, way=Way.DRAFTED)  # 0.9 of it
        num_rounds += rest + 1
    assert 64 <= num_rounds < 200
