"""The ring of spans: order, wrap-around, and what it costs in memory."""

import tracemalloc

import msgspec
import pytest

from pipeline.control import StageProfile
from pipeline.messages import EndDraft, StageName
from pipeline.spans import SpanDump, SpanKind, SpanRecorder
from tests.tiny_profiles import outcome


def recorder(num_spans: int) -> SpanRecorder:
    spans = SpanRecorder()
    spans.start(num_spans=num_spans, now_ns=5)
    return spans


def test_what_was_recorded_is_read_back_field_by_field():
    spans = recorder(8)
    spans.add(SpanKind.VERIFY, 10, 20, request_id="r#1", round_id=3, count=7)
    message = outcome(request_id="r#2", round_id=4)
    spans.add_message(SpanKind.SEND, 21, 23, message=message, peer=StageName.SPECULATOR, sent_ns=22)
    spans.add_message(
        SpanKind.SEND, 30, 31, message=EndDraft(request_id="r#1"), peer=StageName.PREDICTOR, sent_ns=30
    )
    verify, sent, end = spans.dump(now_ns=40).spans()
    assert (verify.kind, verify.start_ns, verify.end_ns) == (SpanKind.VERIFY, 10, 20)
    assert (verify.request_id, verify.round_id, verify.count) == ("r#1", 3, 7)
    assert (verify.message, verify.peer) == ("", None)
    assert (sent.kind, sent.message, sent.peer) == (SpanKind.SEND, "Outcome", StageName.SPECULATOR)
    assert (sent.request_id, sent.round_id, sent.sent_ns) == ("r#2", 4, 22)
    assert (end.message, end.request_id, end.round_id) == ("EndDraft", "r#1", -1)


@pytest.mark.parametrize("num_added", [0, 1, 4, 5, 7, 8, 9, 23])
def test_a_full_ring_keeps_the_latest_spans_in_order(num_added):
    spans = recorder(4)
    for number in range(num_added):
        spans.add(SpanKind.WORK, number, number + 1)
    dump = spans.dump(now_ns=99)
    expected = list(range(num_added))[-4:]
    assert [span.start_ns for span in dump.spans()] == expected
    assert dump.num_overwritten == num_added - len(expected)
    assert (dump.start_ns, dump.end_ns) == (5, 99)


def test_a_new_start_forgets_what_was_recorded_before():
    spans = recorder(4)
    spans.add(SpanKind.WORK, 1, 2, request_id="old")
    spans.start(num_spans=4, now_ns=50)
    spans.add(SpanKind.WORK, 60, 61, request_id="new")
    dump = spans.dump(now_ns=99)
    assert [(span.start_ns, span.request_id) for span in dump.spans()] == [(60, "new")]
    assert "old" not in dump.request_ids


def test_a_recorder_is_off_and_empty_before_the_start_and_after_the_stop():
    spans = SpanRecorder()
    assert not spans.is_on
    assert list(spans.dump(now_ns=1).spans()) == []
    spans.start(num_spans=4, now_ns=2)
    assert spans.is_on
    spans.add(SpanKind.WORK, 3, 4)
    spans.stop()
    assert not spans.is_on
    assert list(spans.dump(now_ns=5).spans()) == []


def test_recording_allocates_nothing_that_stays():
    spans = recorder(64)

    def record(count: int) -> None:
        for number in range(count):
            spans.add(SpanKind.BRANCH, 1 << 50, 1 << 51, request_id="r#1", round_id=number, count=3)

    record(100)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        record(10_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000


def test_a_ring_without_room_is_refused():
    with pytest.raises(ValueError, match="at least 1 span, got 0"):
        SpanRecorder().start(num_spans=0, now_ns=0)


def test_a_dump_travels_as_a_message():
    spans = recorder(4)
    spans.add(SpanKind.PLAN, 1, 2, request_id="r", round_id=0, count=9)
    sent = StageProfile(spans=spans.dump(now_ns=3), kernel_trace=None)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StageProfile)
    assert isinstance(arrived.spans, SpanDump)
    assert list(arrived.spans.spans()) == list(sent.spans.spans())
