"""The benchmark's arithmetic on hand-computed numbers, and its rule about tokens."""

import pytest

from conf.schema import DType
from tests.bench_plans import make_answer, make_metrics, make_row
from tools.bench.entries import Entry, parse_systems
from tools.bench.measures import (
    DecodeTimes,
    TokenGaps,
    acceptance_length,
    decode_times,
    hit_rate,
    round_times,
    speed,
    speed_ratio,
    token_gaps,
    ttft_ms,
)
from tools.bench.schedule import turns
from tools.bench.token_check import Rule, check_tokens, reference_tokens, rule_between


def times(num_decoded: float, seconds: float) -> DecodeTimes:
    return DecodeTimes(num_decoded=num_decoded, seconds=seconds)


def test_every_system_answers_a_prompt_before_the_next_and_the_first_one_changes() -> None:
    order = list(turns(["A", "B", "C"], temperatures=[0.0], num_groups=2, repeats=2))
    assert [turn.label for turn in order] == list("ABCBCABCACAB")
    assert [(turn.repeat, turn.group) for turn in order[::3]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_repeat_goes_through_every_temperature() -> None:
    order = list(turns(["A", "B"], temperatures=[0.0, 1.0], num_groups=1, repeats=2))
    assert [(turn.repeat, turn.temperature) for turn in order[::2]] == [
        (0, 0.0),
        (0, 1.0),
        (1, 0.0),
        (1, 1.0),
    ]


def test_as_many_prompts_as_systems_still_change_who_begins() -> None:
    begins = [t.label for t in turns(["A", "B"], temperatures=[0.0], num_groups=2, repeats=2)][::2]
    assert begins == ["A", "B", "B", "A"]


def test_a_prompts_times_are_medians_over_its_repeats() -> None:
    rows = [
        make_row(make_answer(seconds=s, ttft_ms=t), repeat=r)
        for r, (s, t) in enumerate([(9.0, 125.0), (1.0, 500.0), (2.0, 250.0)])
    ]
    rows.append(make_row(make_answer([4], ttft_ms=1000.0), index=1))
    assert decode_times(rows) == {("a", 0): times(4, 2.0), ("a", 1): times(0, 0.0)}
    assert ttft_ms(rows) == 625.0


def test_a_batch_lasts_from_its_first_block_to_its_last() -> None:
    batch = make_row(
        make_answer([1, 2, 3], blocks=[(0.5, 1), (1.0, 2)]),
        make_answer([4] * 6, blocks=[(0.75, 2), (1.5, 1), (2.5, 3)]),
        make_answer([9], blocks=[(3.5, 1)]),
    )
    assert decode_times([batch]) == {("a", 0): times(2 + 4, 3.0)}
    assert speed(decode_times([batch]).values()) == 2.0
    assert ttft_ms([batch]) == 750.0


def test_a_block_of_n_tokens_counts_as_n_tokens_that_share_its_time() -> None:
    # Gaps: one token 100 ms; four tokens 50 ms each; the other answer: twelve tokens 10 ms each, one 1000 ms.
    rows = [
        make_row(make_answer([0] * 6, blocks=[(1.0, 1), (1.1, 1), (1.3, 4)])),
        make_row(make_answer([0] * 16, blocks=[(0.2, 3), (0.32, 12), (1.32, 1)]), index=1),
    ]
    gaps = token_gaps(rows)
    assert gaps is not None
    assert gaps.median_ms == pytest.approx(10.0)
    # 18 gaps: the 95th percentile lies 0.15 of the way from the last but one, 100 ms, to the last.
    assert gaps.p95_ms == pytest.approx(100 + 0.15 * 900)
    assert token_gaps([make_row(make_answer([4]))]) is None
    one = token_gaps([make_row(make_answer([4] * 3, blocks=[(0.0, 1), (0.25, 2)]))])
    assert one == TokenGaps(median_ms=125.0, p95_ms=125.0)


def test_speed_is_all_tokens_over_all_seconds() -> None:
    assert speed([times(10, 1.0), times(20, 4.0), times(0, 0.0)]) == 6.0
    assert speed([times(0, 0.0)]) is None
    assert speed([]) is None


def test_the_ratio_is_of_the_prompts_that_both_decoded() -> None:
    system = {("a", 0): times(10, 1.0), ("a", 1): times(30, 3.0), ("a", 2): times(99, 1.0)}
    baseline = {("a", 0): times(10, 2.0), ("a", 1): times(30, 6.0), ("a", 2): times(0, 0.0)}
    ratio = speed_ratio(system, baseline)
    assert ratio is not None
    assert ratio.value == 2.0
    # Every prompt has the same ratio: so has every resample.
    assert ratio.interval == pytest.approx((2.0, 2.0))
    assert speed_ratio({("a", 0): times(1, 1)}, {("b", 0): times(1, 1)}) is None


def test_the_interval_spans_what_prompts_say_and_is_reproducible() -> None:
    baseline = {("a", n): times(10, 1.0) for n in range(2)}
    system = {("a", 0): times(10, 1.0), ("a", 1): times(10, 0.5)}
    ratio = speed_ratio(system, baseline)
    assert ratio is not None
    assert ratio.value == pytest.approx(20 / 1.5 / 10)
    # Both prompts are drawn as the first one a quarter of the time, as the second another quarter.
    assert ratio.interval == pytest.approx((1.0, 2.0))
    assert speed_ratio(system, baseline) == ratio
    one = speed_ratio({("a", 0): times(10, 1.0)}, baseline)
    assert one is not None
    assert one.interval is None


def test_acceptance_and_hits_are_counted_over_all_answers() -> None:
    metrics = make_metrics(cache_hits=8, cache_misses=2)
    rows = [
        make_row(make_answer([1] * 12, num_rounds=4, metrics=metrics)),
        make_row(make_answer([1] * 8, num_rounds=4, metrics=metrics), index=1),
    ]
    assert acceptance_length(rows) == 2.5
    assert hit_rate(rows) == 0.8
    peer = [make_row(make_answer(num_rounds=None))]
    assert (acceptance_length(peer), hit_rate(peer), round_times(peer)) == (None, None, None)


def test_round_times_are_medians_summed_over_prompts_a_decode_round() -> None:
    def row(index: int, repeat: int, num_rounds: int, target_ms: float, wait_ms: float) -> object:
        metrics = make_metrics(
            num_rounds=num_rounds,
            target_compute_ms=target_ms,
            target_wait_ms=wait_ms,
            overlap_ms=2 * wait_ms,
            overhead_ms=0.0,
        )
        return make_row(make_answer(metrics=metrics), index=index, repeat=repeat)

    rows = [
        row(0, 0, 11, 100.0, 5.0),
        row(0, 1, 11, 120.0, 7.0),
        row(0, 2, 11, 900.0, 6.0),
        row(1, 0, 1, 0.0, 0.0),
    ]
    found = round_times(rows)
    assert found is not None
    assert (found.num_rounds, found.target_ms, found.wait_ms) == (12, 12.0, 0.6)
    assert (found.overlap_ms, found.overhead_ms) == (1.2, 0.0)
    only_prefill = round_times([row(1, 0, 1, 0.0, 0.0)])
    assert only_prefill is not None
    assert (only_prefill.num_rounds, only_prefill.target_ms) == (1, None)


def entry(text: str) -> Entry:
    return parse_systems(text)[0]


@pytest.mark.parametrize(
    ("system", "baseline", "dtype", "temperature", "rule"),
    [
        ("saguaro", "autoregressive", DType.bfloat16, 0.0, Rule.must_match),
        ("saguaro", "autoregressive", DType.bfloat16, 1.0, Rule.must_match),
        ("transformers", "autoregressive", DType.float32, 0.0, Rule.must_match),
        ("transformers", "autoregressive", DType.bfloat16, 0.0, Rule.may_differ),
        ("transformers", "autoregressive", DType.float32, 1.0, Rule.own_draws),
        ("llama_cpp", "autoregressive", DType.float32, 0.0, Rule.may_differ),
        ("saguaro", "transformers", DType.bfloat16, 0.0, Rule.may_differ),
        ("vllm", "autoregressive", DType.bfloat16, 0.0, Rule.may_differ),
        ("vllm", "autoregressive", DType.float32, 0.0, Rule.must_match),
    ],
)
def test_whose_tokens_must_be_equal(
    system: str, baseline: str, dtype: DType, temperature: float, rule: Rule
) -> None:
    assert rule_between(entry(system), entry(baseline), dtype=dtype, temperature=temperature) is rule


def test_the_rejection_rule_must_match_only_where_nothing_is_drawn() -> None:
    both = {"dtype": DType.float32, "is_coupled": False}
    system, baseline = entry("saguaro"), entry("autoregressive")
    assert rule_between(system, baseline, temperature=0.0, **both) is Rule.must_match
    assert rule_between(system, baseline, temperature=1.0, **both) is Rule.own_draws


def test_tokens_are_compared_answer_by_answer_with_the_baselines_first() -> None:
    reference = reference_tokens(
        [
            make_row(make_answer([9]), repeat=1),
            make_row(make_answer([1, 2])),
            make_row(make_answer([3]), index=1),
        ]
    )
    assert reference == {("a", 0): [1, 2], ("a", 1): [3]}
    rows = [
        make_row(make_answer([1, 2])),
        make_row(make_answer([1, 4]), repeat=1),
        make_row(make_answer([3]), index=1),
        make_row(make_answer([3]), index=2),
    ]
    refused = check_tokens(rows, reference, Rule.must_match)
    assert refused.is_refused
    assert str(refused) == "refused: 1 of 3 answers differ"
    counted = check_tokens(rows, reference, Rule.may_differ)
    assert not counted.is_refused
    assert str(counted) == "2 of 3 identical, 1 not compared"
    assert str(check_tokens(rows[:1], reference, Rule.must_match)) == "1 of 1 identical"
    assert str(check_tokens(rows, {}, Rule.must_match)) == "not compared: no answers to compare with"
    assert str(check_tokens(rows, reference, Rule.own_draws)) == "not compared: other draws"
