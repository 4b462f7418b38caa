"""What the planner measures, and what it makes of it. Times are in ms here."""

from __future__ import annotations

import math
import random

import pytest

from conf.schema import SpeculationConfig, TreeConfig
from stages.draft_speculator.calibration import Calibration
from stages.draft_speculator.growth import Entry, Shape
from stages.draft_speculator.measures import Delays, Measures, Rate, Ratio
from stages.draft_speculator.ngram_draft import LookedUp
from stages.draft_speculator.planner import OnlinePlanner
from stages.draft_speculator.time_model import TimeModel

MS = 1e6


def _time_model(base: float, slope: float, *, rows: range = range(1, 12), noise: float = 0.0) -> TimeModel:
    draw, model = random.Random(3), TimeModel()
    for _ in range(20):
        for n in rows:
            model.add(n, (base + slope * n) * MS * (1 + noise * draw.uniform(-1, 1)))
    return model


def test_times_are_fitted_to_base_and_slope() -> None:
    model = _time_model(20, 0.5, noise=0.03)
    assert model.slope_ns / MS == pytest.approx(0.5, rel=0.2)
    assert model.predict_ns(1) / MS == pytest.approx(20.5, rel=0.02)
    assert model.predict_ns(30) / MS == pytest.approx(35, rel=0.1)


def test_equal_row_counts_leave_the_slope_near_its_prior() -> None:
    model = _time_model(20, 0.5, rows=range(6, 7))
    assert model.predict_ns(6) / MS == pytest.approx(23)
    assert model.slope_ns / MS == pytest.approx(0.02 * 23, rel=0.01)


def test_one_slow_forward_does_not_upset_the_fit() -> None:
    model = _time_model(20, 0.5)
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


def test_proposals_are_cut_where_the_next_group_of_rows_begins() -> None:
    measures = _measured()
    for _ in range(20):
        for rows in (1, 4, 6, 7, 9, 11):
            measures.target.add(rows, (22 if rows <= 6 else 44) * MS)
    # The root takes a row. Five more are nearly free, a sixth costs 22 ms, or 1.8 tokens.
    chain = _chain(0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
    assert len(_planner(measures).keep(chain, other_rows=0)) == 5
    assert len(_planner(measures).keep(_chain(0.9, 0.8, 0.3, 0.1), other_rows=3)) == 2


def test_a_steep_slope_never_predicts_a_forward_of_no_time() -> None:
    model = _time_model(-30, 10, rows=range(6, 9))
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


def _measured(
    *, step: float = 3.0, row: float = 0.5, tokens: int = 2, round_ms: float = 25.0, rounds: int = 40
) -> Measures:
    """A target that takes 20 ms and `row` for each row, a draft that takes `step`, `tokens` a round."""
    measures = Measures()
    measures.target = _time_model(20, row)
    measures.step = _time_model(step, 0.1)
    for _ in range(rounds):
        measures.add_round(tokens=tokens, ns=round_ms * MS, is_plain=False)
    return measures


def _planner(measures: Measures, **tree: int) -> OnlinePlanner:
    shape = Shape.of(SpeculationConfig(depth=6, tree=TreeConfig(**tree)))
    return OnlinePlanner(shape, measures, min_path_prob=0.2, budget=24)


def _chain(*probs: float) -> list[Entry]:
    """Entries whose path values are these."""
    return [Entry(i - 1, i, 0.0, math.log(p), i + 1, None) for i, p in enumerate(probs)]


def test_nodes_are_kept_while_they_are_worth_a_row() -> None:
    # 2 tokens in 25 ms: half a ms is worth 0.04 tokens.
    planner = _planner(_measured())
    assert len(planner.keep(_chain(0.8, 0.3, 0.05, 0.03, 0.01), other_rows=0)) == 3
    assert len(_planner(_measured(row=4.0)).keep(_chain(0.8, 0.5, 0.2, 0.1), other_rows=0)) == 2


def test_what_stays_keeps_its_parents() -> None:
    entries = [
        Entry(-1, 5, 0.0, math.log(0.02), 1, None),
        Entry(0, 6, 0.0, math.log(0.01), 2, None),
        Entry(-1, 7, 0.0, math.log(0.5), 1, None),
        Entry(2, 8, 0.0, math.log(0.4), 2, None),
    ]
    kept = _planner(_measured(), nodes=8).keep(entries, other_rows=0)
    assert [(entry.parent, entry.token_id) for entry in kept] == [(-1, 7), (0, 8)]


def test_steps_that_the_target_waits_for_must_win_more_than_they_cost() -> None:
    cheap, dear = _planner(_measured(step=1.0)), _planner(_measured(step=8.0))
    assert cheap.waiting_reads([[0.0]]) == [1]
    assert cheap.waiting_reads([[math.log(0.5)]]) == [1]
    assert dear.waiting_reads([[math.log(0.5)]]) == [0]


def test_all_waiting_requests_count_in_the_price() -> None:
    measures = _measured(step=3.0, row=0.1)
    assert _planner(measures).pays_to_wait([[]])
    measures.num_active = 8
    for _ in range(40):
        measures.add_round(tokens=2, ns=25 * MS, is_plain=False)
    assert not _planner(measures).pays_to_wait([[]])
    assert _planner(measures).pays_to_wait([[]] * 8), "a step that serves all of them"


def test_after_a_miss_the_draft_rests_where_looking_up_promises_more() -> None:
    measures = _measured(step=5.0)
    planner = _planner(measures)
    chain = [LookedUp(token, 4) for token in (7, 8, 9)]
    for _ in range(50):
        measures.look_up[4].add(False)
    assert planner.pays_to_wait([chain])
    for _ in range(500):
        measures.look_up[4].add(True)
    assert not planner.pays_to_wait([chain])


def test_no_branch_step_is_begun_that_keeps_the_target_waiting_for_little() -> None:
    planner = _planner(_measured(step=3.0), rows=8, nodes=8)
    unlikely = [math.log(0.05)] * 4
    assert planner.branch_reads([unlikely], left_ns=10 * MS)[0] > 0
    assert planner.branch_reads([unlikely], left_ns=0.0) == [0]
    assert planner.branch_reads([[math.log(0.9)]], left_ns=0.0) == [1]


def test_an_overdue_outcome_is_expected_as_past_ones_came() -> None:
    planner = _planner(_measured(step=3.0), rows=8, nodes=8)
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
    measures = _measured(row=4.0)
    planner = _planner(measures)
    chain = [LookedUp(7, 4), LookedUp(8, 4), LookedUp(9, 1)]
    for _ in range(50):
        measures.look_up[4].add(True)
        measures.look_up[1].add(False)
    assert planner.keep_looked_up(chain) == chain[:2]


def test_branches_are_no_more_than_there_is_time_for() -> None:
    assert _planner(_measured(step=20.0)).num_branches() == 4
    assert _planner(_measured(step=0.2)).num_branches() == 24


def _rest(planner: OnlinePlanner) -> int:
    """How long the planner rests from now on, all of it over."""
    rounds = planner.rest_rounds()
    planner.goes_on_resting(0)
    return rounds


def test_speculation_that_is_slower_than_plain_decoding_rests_ever_longer() -> None:
    # 20.5 ms a plain token; a round of 30 ms that commits one.
    measures = _measured(tokens=1, round_ms=30)
    planner = _planner(measures)
    rests = []
    for _ in range(4):
        rests.append(_rest(planner))
        assert planner.rest_rounds() == 0, "on trial again after a rest"
        for _ in range(8):
            measures.add_round(tokens=1, ns=30 * MS, is_plain=False)
    assert rests == [8, 32, 128, 256], "it is hopeless"
    for _ in range(60):
        measures.add_round(tokens=3, ns=30 * MS, is_plain=False)
    assert planner.rest_rounds() == 0
    measures.start_trial()
    for _ in range(20):
        measures.add_round(tokens=1, ns=30 * MS, is_plain=False)
    assert planner.rest_rounds() == 8, "it paid in between, so the rests are short again"


def test_speculation_that_pays_does_not_rest() -> None:
    assert _planner(_measured()).rest_rounds() == 0


def test_plain_decoding_is_measured_anew_the_more_seldom_the_more_speculation_pays() -> None:
    waits = []
    for round_ms in (20, 15):  # against 20.5 ms a plain token: 1.025 and 1.37 times as fast
        measures = _measured(tokens=1, round_ms=round_ms)
        planner = _planner(measures)
        num_rounds = 40
        while not (rest := _rest(planner)):
            measures.add_round(tokens=1, ns=round_ms * MS, is_plain=False)
            num_rounds += 1
        assert rest == 8
        assert planner.rest_rounds() == 0, "one comparison, then it goes on"
        waits.append(num_rounds)
    assert 64 <= waits[0] < 150
    assert 450 < waits[1] < 650


def test_a_machine_on_which_plain_decoding_became_faster_is_noticed() -> None:
    measures = _measured(tokens=1, round_ms=20)
    planner = _planner(measures)
    for _ in range(400):
        if rest := _rest(planner):
            for _ in range(rest):
                measures.add_round(tokens=1, ns=10 * MS, is_plain=True)
            assert measures.plain_rate == pytest.approx(0.1 / MS)
            break
        measures.add_round(tokens=1, ns=20 * MS, is_plain=False)
    assert planner.rest_rounds() == 8, "it does not pay any more"


def test_speculation_that_may_only_have_been_unlucky_goes_on() -> None:
    measures = _measured(tokens=1, round_ms=30)
    planner = _planner(measures)
    assert _rest(planner) == 8
    for tokens in (2, 1, 1, 1, 1, 2):  # of 30 ms: 0.91 of plain decoding, from six rounds
        measures.add_round(tokens=tokens, ns=30 * MS, is_plain=False)
    assert planner.rest_rounds() == 0
    for _ in range(20):
        for tokens in (2, 1, 1, 1, 1, 2):
            measures.add_round(tokens=tokens, ns=30 * MS, is_plain=False)
    assert _rest(planner) == 32, "by now it is no chance"
    for _ in range(20):
        measures.add_round(tokens=1, ns=24 * MS, is_plain=False)
    assert _rest(planner) == 64, "twice as long, for it is not hopeless"


def test_what_is_left_of_a_rest_when_a_request_ends_is_for_the_next() -> None:
    measures = _measured(tokens=1, round_ms=30)
    planner = _planner(measures)
    assert planner.rest_rounds() == 8
    planner.goes_on_resting(7)
    planner.goes_on_resting(6)  # the request ends here
    assert planner.rest_rounds() == 6
    measures.num_active = 16
    assert planner.rest_rounds() == 0, "nothing is known of such a batch"
    measures.num_active = 1
    assert _rest(planner) == 6
    assert planner.rest_rounds() == 0, "on trial"


def test_a_lucky_trial_does_not_shorten_the_rests() -> None:
    measures = _measured(tokens=1, round_ms=30)
    planner = _planner(measures)
    rests = []
    for _ in range(4):
        rests.append(_rest(planner))
        for tokens in (3, 1, 1, 3, 1, 1):
            measures.add_round(tokens=tokens, ns=30 * MS, is_plain=False)
        assert planner.rest_rounds() == 0, "a third more than plain decoding"
        for _ in range(20):
            measures.add_round(tokens=1, ns=30 * MS, is_plain=False)
    assert rests == [8, 32, 128, 256]


def test_nothing_is_planned_before_there_are_figures() -> None:
    planner = _planner(Measures(), rows=4, nodes=8)
    entries = _chain(0.8, 0.001)
    assert planner.keep(entries, other_rows=0) == entries
    assert planner.num_branches() == 24
    assert planner.waiting_reads([[math.log(0.5), math.log(0.1)]]) == [1]
    assert planner.rest_rounds() == 0
    assert planner.figures() is None
