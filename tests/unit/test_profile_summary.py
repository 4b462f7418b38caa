"""What the rounds of a hand-made profile consisted of, and the figures made of that."""

import pytest

from pipeline.messages import StageName
from pipeline.spans import SpanKind
from tests.tiny_profiles import PREDICTOR, SPECULATOR, VERIFIER, HandMade, outcome, proposal, two_rounds
from tools.profile.rounds import Cause, Round, find_rounds
from tools.profile.summary import markdown, summarise
from tools.profile.timeline import make_timeline


def rounds_of(made: HandMade, *, end_us: int = 1000) -> list[Round]:
    return find_rounds(make_timeline(made.profile(end_us=end_us)))


def causes_us(item: Round) -> dict[str, float]:
    return {cause.value: ns / 1000 for cause, ns in item.cause_ns.items() if ns}


def test_every_instant_of_a_round_is_charged_to_one_cause():
    hit, miss = rounds_of(two_rounds())
    assert (hit.start_ns, hit.end_ns, hit.round_id, hit.ready_length) == (110_000, 340_000, 1, 2)
    assert causes_us(hit) == {
        "target": 200,
        "verifier": 11,
        "glue": 5,
        "speculator": 5,
        "messages": 8,
        "other": 1,
    }
    assert (miss.start_ns, miss.end_ns, miss.round_id, miss.ready_length) == (340_000, 720_000, 2, 0)
    assert causes_us(miss) == {
        "target": 200,
        "verifier": 25,
        "draft": 100,
        "speculator": 6,
        "messages": 35,
        "other": 14,
    }
    for item in (hit, miss):
        assert sum(item.cause_ns.values()) == item.length_ns


def test_waits_and_overlap_of_target_and_draft_are_measured_in_the_round():
    hit, miss = rounds_of(two_rounds())
    assert (hit.wait_ns, hit.overhead_ns) == (18_000, 25_000)
    assert (hit.draft_compute_ns, hit.at_once_ns) == (170_000, 165_000)
    assert (hit.draft_wait_ns, hit.draft_idle_ns) == (5_000, 45_000)
    assert (miss.wait_ns, miss.overhead_ns) == (141_000, 80_000)
    assert (miss.draft_compute_ns, miss.at_once_ns) == (100_000, 0)
    assert (miss.draft_wait_ns, miss.draft_idle_ns) == (0, 273_000)


def one_round(stage: StageName | None, kind: SpanKind | None, *, verify_us: int = 100) -> HandMade:
    """A round whose target waits from 20 to 320, while a stage is at something."""
    made = HandMade(VERIFIER, SPECULATOR, PREDICTOR)
    made.span(VERIFIER, SpanKind.PREFILL, 0, 10, round_id=0)
    made.span(VERIFIER, SpanKind.COMMIT, 10, 20, round_id=0)
    if stage is not None and kind is not None:
        made.span(stage, kind, 20, 320, round_id=1)
    made.span(VERIFIER, SpanKind.VERIFY, 320, 320 + verify_us, round_id=1)
    made.span(VERIFIER, SpanKind.COMMIT, 320 + verify_us, 330 + verify_us, round_id=1)
    return made


@pytest.mark.parametrize(
    ("stage", "kind", "cause"),
    [
        (SPECULATOR, SpanKind.DRAFT, Cause.DRAFT),
        (SPECULATOR, SpanKind.BRANCH, Cause.DRAFT),
        (SPECULATOR, SpanKind.GLUE, Cause.GLUE),
        (SPECULATOR, SpanKind.LOOKUP, Cause.SPECULATOR),
        (PREDICTOR, SpanKind.PLAN, Cause.PREDICTOR),
        (VERIFIER, SpanKind.WORK, Cause.VERIFIER),
        (VERIFIER, SpanKind.NOISE, Cause.OTHER),
        (None, None, Cause.OTHER),
    ],
)
def test_a_round_is_bound_by_what_most_of_it_is_charged_to(stage, kind, cause):
    (item,) = rounds_of(one_round(stage, kind))
    assert item.bound_by is cause
    assert item.cause_ns[cause] == 300_000 + (10_000 if cause is Cause.VERIFIER else 0)


def test_a_round_is_bound_by_its_target_or_its_messages():
    (item,) = rounds_of(one_round(SPECULATOR, SpanKind.DRAFT, verify_us=301))
    assert item.bound_by is Cause.TARGET
    made = one_round(None, None)
    made.mail(SPECULATOR, VERIFIER, proposal(round_id=1), sent_us=22, taken_us=318, received_us=319)
    (item,) = rounds_of(made)
    assert item.bound_by is Cause.MESSAGES


def test_an_outcome_that_waits_for_a_branch_step_is_charged_to_the_draft():
    made = one_round(SPECULATOR, SpanKind.BRANCH)
    made.mail(VERIFIER, SPECULATOR, outcome(round_id=0), sent_us=19, taken_us=320, received_us=321)
    timeline = make_timeline(made.profile(end_us=1000))
    (item,) = find_rounds(timeline)
    assert (item.bound_by, item.cause_ns[Cause.MESSAGES]) == (Cause.DRAFT, 0)
    (edge,) = summarise(timeline, [item], run="")["messages"]
    assert edge["mean_ms"] == pytest.approx(0.302)
    assert edge["mean_receiver_busy_ms"] == pytest.approx(0.300)


def test_a_proposal_under_way_is_waited_for_whatever_the_draft_does_by_then():
    made = one_round(SPECULATOR, SpanKind.GLUE)
    made.mail(SPECULATOR, VERIFIER, proposal(round_id=1), sent_us=120, taken_us=318, received_us=319)
    (item,) = rounds_of(made)
    # From 120 to 318, until the verifier takes it.
    assert (item.cause_ns[Cause.GLUE], item.cause_ns[Cause.MESSAGES]) == (101_000, 198_000)
    assert item.cause_ns[Cause.VERIFIER] == 11_000


def test_of_several_proposals_the_last_one_counts():
    made = one_round(SPECULATOR, SpanKind.DRAFT)
    for sent_us in (50, 310):
        made.mail(
            SPECULATOR,
            VERIFIER,
            proposal(round_id=1),
            sent_us=sent_us,
            taken_us=sent_us + 5,
            received_us=sent_us + 6,
        )
    (item,) = rounds_of(made)
    assert item.cause_ns[Cause.MESSAGES] == 5_000
    assert item.bound_by is Cause.DRAFT


def test_a_batch_is_one_round_and_a_prefill_between_two_rounds_belongs_to_neither():
    made = HandMade(VERIFIER)
    for start, kind in ((0, SpanKind.PREFILL), (100, SpanKind.VERIFY), (200, SpanKind.PREFILL)):
        made.span(VERIFIER, kind, start, start + 50, round_id=0)
        made.span(VERIFIER, SpanKind.COMMIT, start + 50, start + 60, round_id=0)
    made.span(VERIFIER, SpanKind.VERIFY, 300, 350, round_id=2)
    for number in range(2):
        made.span(VERIFIER, SpanKind.COMMIT, 350 + 10 * number, 360 + 10 * number, round_id=2)
    first, batch = rounds_of(made)
    assert (first.start_ns, first.end_ns, first.num_requests) == (60_000, 160_000, 1)
    assert (batch.start_ns, batch.end_ns, batch.num_requests) == (260_000, 370_000, 2)


def test_rounds_that_the_ring_has_lost_a_part_of_are_left_out():
    made = two_rounds()
    whole = make_timeline(made.profile(end_us=1000))
    assert len(find_rounds(whole)) == 2
    # Ended before the second round did.
    assert len(rounds_of(made, end_us=719)) == 1
    small = HandMade(VERIFIER, num_spans=4)
    for number in range(4):
        small.span(VERIFIER, SpanKind.VERIFY, 100 * number, 100 * number + 50, round_id=number)
        small.span(VERIFIER, SpanKind.COMMIT, 100 * number + 50, 100 * number + 60, round_id=number)
    timeline = make_timeline(small.profile(end_us=1000))
    assert timeline.num_overwritten == {VERIFIER: 4}
    (last,) = find_rounds(timeline)
    assert (last.round_id, last.start_ns) == (3, 260_000)


def test_the_summary_adds_up_and_is_told_in_tables():
    timeline = make_timeline(two_rounds().profile(end_us=1000))
    rounds = find_rounds(timeline)
    summary = summarise(timeline, rounds, run="by hand")
    assert summary["num_rounds"] == 2
    per_round = summary["per_round"]
    assert per_round["round"]["mean_ms"] == pytest.approx((0.230 + 0.380) / 2)
    assert per_round["target_compute"]["mean_ms"] == pytest.approx(0.200)
    assert per_round["target_wait"]["mean_ms"] == pytest.approx((0.018 + 0.141) / 2)
    assert per_round["target_idle"]["mean_ms"] == pytest.approx((0.001 + 0.014) / 2)
    assert per_round["overhead"]["mean_ms"] == pytest.approx((0.025 + 0.080) / 2)
    causes = summary["causes"]
    assert sum(cause["share"] for cause in causes.values()) == pytest.approx(1)
    assert causes["draft"]["share"] == pytest.approx(100 / 610)
    assert {name: cause["bounds_rounds"] for name, cause in causes.items() if cause["bounds_rounds"]} == {
        "target": 2
    }
    edges = {(edge["sender"], edge["message"]): edge for edge in summary["messages"]}
    outcomes = edges["target-verifier", "Outcome"]
    assert (outcomes["count"], outcomes["p50_ms"], outcomes["mean_ms"]) == (2, 0.016, 0.016)
    assert outcomes["p99_ms"] == pytest.approx(0.010 + 0.99 * 0.012)
    spans = summary["stages"]["draft-speculator"]["spans"]
    assert (spans["branch"]["count"], spans["branch"]["total_ms"]) == (2, 0.090)
    table = markdown(summary)
    assert "| round | 0.305 | 0.305 | 0.379 |" in table
    assert "the target waits for a draft step | 0.050 |" in table
    assert "target-verifier → draft-speculator: Outcome | 2 | 0.016 |" in table
    assert "ring was too small" not in table


def test_a_profile_without_a_round_says_so():
    made = HandMade(VERIFIER, num_spans=1)
    made.span(VERIFIER, SpanKind.WORK, 0, 1)
    made.span(VERIFIER, SpanKind.WORK, 1, 2)
    table = markdown(summarise(make_timeline(made.profile(end_us=9)), [], run="nothing"))
    assert "No decode round lies whole in the profile." in table
    assert "The ring was too small, the oldest spans are missing: target-verifier 1." in table
