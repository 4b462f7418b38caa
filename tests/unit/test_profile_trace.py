"""The trace of a hand-made profile: what viewers demand of it."""

import json
import zlib
from collections import defaultdict

import msgspec
import pytest

from pipeline.control import StageProfile
from pipeline.profiling import EngineProfile
from pipeline.spans import CLOCK_MARK, SpanKind
from tests.tiny_profiles import SPECULATOR, VERIFIER, HandMade, proposal, two_rounds
from tools.profile.timeline import make_timeline
from tools.profile.trace import labels, read_kernels, trace_events, write_trace


@pytest.fixture
def events(tmp_path):
    """As a viewer reads them."""
    profile = two_rounds().profile(end_us=1000)
    path = tmp_path / "trace.json"
    write_trace(path, profile, make_timeline(profile), run="by hand")
    return json.loads(path.read_text("utf-8"))["traceEvents"]


def test_every_event_has_the_fields_of_its_phase(events):
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            assert event["args"]
            continue
        assert event["cat"]
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        else:
            assert isinstance(event["id"], int)


def test_times_are_microseconds_since_the_profile_began(events):
    verify = next(e for e in events if e["ph"] == "X" and e["name"] == "verify")
    assert (verify["ts"], verify["dur"]) == (130, 200)
    assert verify["args"] == {"request": "r#1", "round": 1, "count": 2}


def test_every_stage_has_a_named_track(events):
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    used = {event["tid"] for event in events if event["ph"] != "M"}
    assert used == set(names)
    assert {name.partition(" (pid ")[0] for name in names.values()} == {
        "target-verifier",
        "draft-speculator",
        "outcome-predictor",
    }


def test_spans_of_a_track_come_in_order_and_nest(events):
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_track[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():
        assert spans == sorted(spans, key=lambda span: (span[0], -span[1]))
        open_ends = []
        for start, end in spans:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_every_arrow_leads_from_the_span_that_sends_to_the_span_that_receives(events):
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(event["ph"] == "s" for event in events) == 6
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        for event, cat in ((start, "send"), (end, "receive")):
            assert any(
                span["cat"] == cat
                and span["name"] == f"{cat} {event['name']}"
                and span["tid"] == event["tid"]
                and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
                for span in events
                if span["ph"] == "X"
            )


def test_a_message_with_one_end_gets_no_arrow():
    made = HandMade(VERIFIER, SPECULATOR, num_spans=1)
    made.mail(SPECULATOR, VERIFIER, proposal(round_id=1), sent_us=5, taken_us=9, received_us=10)
    made.span(SPECULATOR, SpanKind.WORK, 20, 30)  # overwrites the sending
    profile = made.profile(end_us=100)
    timeline = make_timeline(profile)
    assert timeline.num_unmatched == 1
    assert {event["ph"] for event in trace_events(profile, timeline)} == {"M", "X"}


def test_steps_are_numbered_within_their_round():
    timeline = make_timeline(two_rounds().profile(end_us=1000))
    spans = timeline.spans[SPECULATOR]
    named = [label for label in labels(spans) if "step" in label]
    assert named == ["branch step 1", "branch step 2", "draft step 1"]


def kernel_trace(*events: dict) -> bytes:
    common = {"ph": "X", "pid": 7, "tid": 8}
    return zlib.compress(json.dumps({"traceEvents": [{**common, **event} for event in events]}).encode())


def with_kernels(trace: bytes) -> EngineProfile:
    profile = two_rounds().profile(end_us=1000)
    stage = StageProfile(spans=profile.stages[VERIFIER].spans, kernel_trace=trace)
    return msgspec.structs.replace(profile, stages={**profile.stages, VERIFIER: stage})


def test_kernels_are_put_on_the_clock_of_the_spans():
    # The profiler's clock is 5,000 us ahead; one of the marks was slow.
    marks = [
        {"name": f"{CLOCK_MARK}{10_000 * n}", "ts": 5000 + 10 * n + slow, "dur": 1}
        for n, slow in ((1, 400), (2, 0), (3, 0))
    ]
    trace = kernel_trace(
        *marks,
        {"name": "aten::mm", "cat": "cpu_op", "ts": 5150, "dur": 20},
        {"name": "aten::linear", "cat": "cpu_op", "ts": 5150, "dur": 50},
    )
    linear, mm = read_kernels(trace)
    assert (linear.name, linear.start_ns, linear.duration_ns) == ("aten::linear", 150_000, 50_000)
    assert (mm.name, mm.place) == ("aten::mm", ("7", "8"))
    profile = with_kernels(trace)
    events = trace_events(profile, make_timeline(profile))
    (track,) = {event["tid"] for event in events if event.get("cat") == "cpu_op"}
    (name,) = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["tid"] == track]
    assert name.startswith("target-verifier kernels")
    assert next(e for e in events if e["name"] == "aten::mm")["ts"] == 150


def test_a_kernel_trace_without_marks_is_refused():
    with pytest.raises(ValueError, match="no mark of the monotonic clock"):
        read_kernels(kernel_trace({"name": "aten::mm", "cat": "cpu_op", "ts": 1, "dur": 2}))
