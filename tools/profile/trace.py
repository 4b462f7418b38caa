"""A profile as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

The Trace Event Format: a track per stage with its spans as complete events, an arrow per message as a pair of
flow events, and beside a stage the kernels that were traced inside it. Times in it are microseconds since the
profile began.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.messages import StageName
from pipeline.profiling import EngineProfile
from pipeline.spans import CLOCK_MARK, Span, SpanKind
from tools.profile.timeline import Timeline

Event = dict[str, Any]

_PID = 1
"""All stages are one process to the viewer, so that their tracks stand together."""
_TRACKS = (
    StageName.FRONTEND,
    StageName.TOKENIZER,
    StageName.VERIFIER,
    StageName.SPECULATOR,
    StageName.PREDICTOR,
    StageName.DETOKENIZER,
)
_KERNEL_TRACK = 100
"""Tracks of kernels are numbered from here, 100 for each stage."""
_MESSAGE_KINDS = (SpanKind.RECEIVE, SpanKind.HANDLE, SpanKind.SEND)


def write_trace(path: Path, profile: EngineProfile, timeline: Timeline, *, run: str) -> None:
    """Write the trace. run: what was profiled, in a line."""
    trace = {
        "traceEvents": trace_events(profile, timeline),
        "displayTimeUnit": "ms",
        "otherData": {"run": run, "monotonic_ns_at_0": str(_origin_ns(timeline))},
    }
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def trace_events(profile: EngineProfile, timeline: Timeline) -> list[Event]:
    """All events; those of one track in the order of time."""
    origin_ns = _origin_ns(timeline)
    events: list[Event] = [_metadata("process_name", 0, name="saguaro engine")]
    for track, stage in enumerate(_TRACKS):
        if stage not in timeline.spans:
            continue
        events += _named_track(track, f"{stage.value} (pid {profile.pids[stage]})", order=2 * track)
        events += (
            _span_event(span, label, track, origin_ns)
            for span, label in zip(timeline.spans[stage], labels(timeline.spans[stage]), strict=True)
        )
        kernels = profile.stages[stage].kernel_trace
        if kernels is not None:
            first = _KERNEL_TRACK * (track + 1)
            events += _kernel_events(kernels, stage, first, order=2 * track + 1, origin_ns=origin_ns)
    events += _flow_events(timeline, origin_ns)
    return events


def labels(spans: Sequence[Span]) -> Iterator[str]:
    """What to call each span of one stage: its kind, with the message, or with the number of the step."""
    steps: dict[tuple[str, int, SpanKind], int] = {}
    for span in spans:
        name = span.kind.name.lower()
        if span.message:
            name = f"{name} {span.message}"
        elif span.kind in (SpanKind.BRANCH, SpanKind.DRAFT):
            key = (span.request_id, span.round_id, span.kind)
            steps[key] = steps.get(key, 0) + 1
            name = f"{name} step {steps[key]}"
        yield name


def _origin_ns(timeline: Timeline) -> int:
    starts = [spans[0].start_ns for spans in timeline.spans.values() if spans]
    return min([timeline.window[0], *starts])


def _us(ns: int, origin_ns: int) -> float:
    return (ns - origin_ns) / 1000


def _span_event(span: Span, label: str, track: int, origin_ns: int) -> Event:
    args: dict[str, Any] = {}
    if span.request_id:
        args["request"] = span.request_id
    if span.round_id >= 0:
        args["round"] = span.round_id
    if span.count or span.kind is SpanKind.LOOKUP:
        args["count"] = span.count
    if span.peer is not None:
        args["from" if span.kind is not SpanKind.SEND else "to"] = span.peer.value
    return {
        "name": label,
        "cat": span.kind.name.lower(),
        "ph": "X",
        "ts": _us(span.start_ns, origin_ns),
        "dur": (span.end_ns - span.start_ns) / 1000,
        "pid": _PID,
        "tid": track,
        "args": args,
    }


def _flow_events(timeline: Timeline, origin_ns: int) -> Iterator[Event]:
    """An arrow from the span that sends each message to the one that takes it."""
    for number, mail in enumerate(timeline.mails, start=1):
        common = {"name": mail.message, "cat": "message", "id": number, "pid": _PID}
        sender, receiver = _TRACKS.index(mail.sender), _TRACKS.index(mail.receiver)
        yield {**common, "ph": "s", "ts": _us(mail.sent_ns, origin_ns), "tid": sender}
        # bp=e: the arrow ends at the span around this instant, not at the next one.
        yield {**common, "ph": "f", "bp": "e", "ts": _us(mail.taken_ns, origin_ns), "tid": receiver}


def _named_track(track: int, name: str, *, order: int) -> Iterator[Event]:
    yield _metadata("thread_name", track, name=name)
    yield _metadata("thread_sort_index", track, sort_index=order)


def _metadata(what: str, track: int, **args: object) -> Event:
    return {"name": what, "ph": "M", "pid": _PID, "tid": track, "args": args}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvent:
    """One operator or kernel; its thread or stream is (pid, tid) as the profiler has them."""

    name: str
    category: str
    start_ns: int
    duration_ns: int
    place: tuple[str, str]


def read_kernels(trace: bytes) -> list[KernelEvent]:
    """What `stages.model.kernel_trace` traced, on the clock of the spans, by start.

    Raises `ValueError` where the trace has no marks to set its clock by.
    """
    events = [
        event
        for event in json.loads(zlib.decompress(trace))["traceEvents"]
        if event.get("ph") == "X" and "ts" in event and "dur" in event
    ]
    offset_ns = _clock_offset_ns(events)
    found = [
        KernelEvent(
            name=event["name"],
            category=event.get("cat", ""),
            start_ns=round(1000 * event["ts"]) + offset_ns,
            duration_ns=round(1000 * event["dur"]),
            place=(str(event["pid"]), str(event["tid"])),
        )
        for event in events
        if not event["name"].startswith(CLOCK_MARK) and event.get("cat") not in ("Trace", "overhead")
    ]
    return sorted(found, key=lambda event: (event.start_ns, -event.duration_ns))


def _clock_offset_ns(events: Sequence[Mapping[str, Any]]) -> int:
    """`time.monotonic_ns()` minus the profiler's time, from the marks."""
    offsets = [
        int(event["name"].removeprefix(CLOCK_MARK)) - round(1000 * event["ts"])
        for event in events
        if event["name"].startswith(CLOCK_MARK)
    ]
    if not offsets:
        raise ValueError("the kernel trace has no mark of the monotonic clock")
    return int(median(offsets))


def _kernel_events(
    trace: bytes, stage: StageName, first_track: int, *, order: int, origin_ns: int
) -> Iterator[Event]:
    tracks: dict[tuple[str, str], int] = {}
    for event in read_kernels(trace):
        track = tracks.get(event.place)
        if track is None:
            track = tracks[event.place] = first_track + len(tracks)
            name = f"{stage.value} kernels ({'/'.join(event.place)})"
            yield from _named_track(track, name, order=order)
        yield {
            "name": event.name,
            "cat": event.category or "kernel",
            "ph": "X",
            "ts": _us(event.start_ns, origin_ns),
            "dur": event.duration_ns / 1000,
            "pid": _PID,
            "tid": track,
            "args": {},
        }
