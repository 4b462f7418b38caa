"""Stopping and the clock of a request."""

from __future__ import annotations

import pytest

from pipeline.messages import FinishReason, Proposal, ProposalSource, Sampling
from stages.target_verifier.round_clock import RoundClock, TargetClock, idle_spans, merge_spans, overlap_ns
from stages.target_verifier.stopping import Ending, StopRules


@pytest.mark.parametrize(
    ("block", "room", "num_kept", "reason"),
    [
        ([1, 2, 3], 9, 3, None),
        ([1, 2, 3], 3, 3, FinishReason.LENGTH),
        ([1, 2, 3], 2, 2, FinishReason.LENGTH),
        ([0, 2, 3], 9, 1, FinishReason.STOP),
        ([1, 2, 0], 3, 3, FinishReason.STOP),
        ([1, 2, 0], 2, 2, FinishReason.LENGTH),
    ],
)
def test_a_block_ends_where_the_request_ends(
    block: list[int], room: int, num_kept: int, reason: FinishReason | None
) -> None:
    rules = StopRules(Sampling(max_tokens=9, seed=0), eos_token_ids={0})
    assert rules.find_ending(block, room=room) == Ending(num_kept=num_kept, finish_reason=reason)


def test_overlap_and_idle_time_of_spans() -> None:
    assert overlap_ns([(0, 10), (20, 30)], [(5, 25)]) == 10
    assert overlap_ns([], [(0, 9)]) == 0
    assert idle_spans((0, 10), [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert idle_spans((0, 10), [(0, 10)]) == []
    assert idle_spans((4, 4), []) == []


def test_a_round_is_split_into_compute_wait_overlap_and_overhead() -> None:
    target = TargetClock()
    clock = RoundClock(submitted_ns=0, target=target, has_cache=True)
    target.add(0, 100)
    clock.end_prefill(100)
    # The draft works from 150 to 180 while the target waits until 200; then the target verifies 210-300.
    clock.start_round(
        _proposal([(150, 180)], ProposalSource.BACKUP), draft_spans=[(150, 180)], now_ns=200, has_waited=True
    )
    target.add(210, 300)
    clock.end_round(num_proposed=4, num_accepted=2, num_committed=3, now_ns=305)
    # Meanwhile the draft prepared 220-280: overlap. A hit comes at once.
    clock.start_round(
        _proposal([(220, 280)], ProposalSource.HIT), draft_spans=[(220, 280)], now_ns=310, has_waited=True
    )
    target.add(312, 400)
    clock.end_round(num_proposed=4, num_accepted=4, num_committed=5, now_ns=402)
    metrics = clock.metrics()
    assert metrics.target_compute_ms == pytest.approx((90 + 88) / 1e6)
    assert metrics.target_wait_ms == pytest.approx((100 + 5) / 1e6)
    assert metrics.draft_wait_ms == pytest.approx(30 / 1e6)
    assert metrics.overlap_ms == pytest.approx(60 / 1e6)
    assert metrics.overhead_ms == pytest.approx((302 - 178 - 30) / 1e6)
    assert (metrics.num_rounds, metrics.cache_hits, metrics.cache_misses) == (3, 1, 1)
    assert metrics.acceptance_length == 9 / 3
    assert metrics.acceptance_rate == 6 / 8
    assert metrics.mean_ready_length == 4


def test_rows_of_a_batch_share_the_wait_for_the_slowest_and_a_round_cut_off_does_not_count() -> None:
    target = TargetClock()
    clock = RoundClock(submitted_ns=0, target=target, has_cache=True)
    target.add(0, 100)
    clock.end_prefill(100)
    # This row hit; its mate's backup drafts from 110 to 160.
    clock.start_round(
        _proposal([], ProposalSource.HIT), draft_spans=[(110, 160)], now_ns=165, has_waited=True
    )
    target.add(165, 200)
    clock.end_round(num_proposed=4, num_accepted=0, num_committed=1, now_ns=200)
    assert clock.metrics().draft_wait_ms == pytest.approx(50 / 1e6)
    assert clock.metrics().overhead_ms == pytest.approx(15 / 1e6)
    clock.start_round(_proposal([], ProposalSource.HIT), draft_spans=[], now_ns=300, has_waited=True)
    target.add(300, 400)
    metrics = clock.metrics()
    assert (metrics.cache_hits, metrics.num_rounds) == (1, 2)
    assert metrics.target_wait_ms == pytest.approx(65 / 1e6)
    assert metrics.overhead_ms == pytest.approx(15 / 1e6)


def test_spans_are_merged() -> None:
    assert merge_spans([(5, 9), (0, 2), (1, 3), (9, 10)]) == [(0, 3), (5, 10)]
    assert merge_spans([]) == []


def _proposal(spans: list[tuple[int, int]], source: ProposalSource) -> Proposal:
    return Proposal(
        request_id="r",
        round_id=1,
        committed_len=1,
        token_ids=[1, 2, 3, 4],
        parents=[-1, 0, 1, 2],
        source=source,
        ready_length=4,
        draft_spans=spans,
    )
