"""The spans and messages of a profile, as objects in the order of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.messages import StageName
from pipeline.profiling import EngineProfile
from pipeline.spans import Span, SpanKind

Interval = tuple[int, int]
"""Start and end, in ns."""

DRAFT_KINDS = frozenset({SpanKind.READ, SpanKind.DRAFT, SpanKind.GLUE, SpanKind.BRANCH})
"""In which the draft computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """One message whose sender and receiver were both recorded."""

    sender: StageName
    receiver: StageName
    message: str
    request_id: str
    round_id: int
    sent_ns: int
    taken_ns: int
    """When the receiver began to take it; not before `sent_ns`."""
    received_ns: int
    """When it was decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A decoded profile."""

    spans: Mapping[StageName, Sequence[Span]]
    """By start; of spans with the same start the longer one first, so that each follows what it lies in."""
    mails: Sequence[Mail]
    """By the time they were sent."""
    num_unmatched: int
    """Messages of which one end was not recorded, or was overwritten."""
    num_overwritten: Mapping[StageName, int]
    window: Interval
    """From when every stage recorded, and nothing of that was overwritten, until the first stopped."""

    def of_kind(self, stage: StageName, *kinds: SpanKind) -> list[Span]:
        """The spans of some kinds of one stage."""
        return [span for span in self.spans.get(stage, ()) if span.kind in kinds]


def make_timeline(profile: EngineProfile) -> Timeline:
    """Decode a profile and match the two ends of each message."""
    recorded = {name: list(stage.spans.spans()) for name, stage in profile.stages.items()}
    mails, num_unmatched = match_mails(recorded)
    starts = []
    for name, stage in profile.stages.items():
        is_cut = stage.spans.num_overwritten > 0 and recorded[name]
        starts.append(recorded[name][0].end_ns if is_cut else stage.spans.start_ns)
    return Timeline(
        spans={
            name: sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
            for name, spans in recorded.items()
        },
        mails=mails,
        num_unmatched=num_unmatched,
        num_overwritten={name: stage.spans.num_overwritten for name, stage in profile.stages.items()},
        window=(max(starts), min(stage.spans.end_ns for stage in profile.stages.values())),
    )


def match_mails(recorded: Mapping[StageName, Iterable[Span]]) -> tuple[list[Mail], int]:
    """The messages of which both ends were recorded, and the number of the others.

    A message is named by its sender, its receiver and the time it was sent.
    """
    sent: dict[tuple[StageName, StageName, int], Span] = {}
    received: dict[tuple[StageName, StageName, int], Span] = {}
    for stage, spans in recorded.items():
        for span in spans:
            if span.peer is None:
                continue
            if span.kind is SpanKind.SEND:
                sent[stage, span.peer, span.sent_ns] = span
            elif span.kind is SpanKind.RECEIVE:
                received[span.peer, stage, span.sent_ns] = span
    mails = [
        Mail(
            sender=sender,
            receiver=receiver,
            message=span.message,
            request_id=span.request_id,
            round_id=span.round_id,
            sent_ns=sent_ns,
            taken_ns=max(sent_ns, taken.start_ns),
            received_ns=taken.end_ns,
        )
        for (sender, receiver, sent_ns), span in sent.items()
        if (taken := received.get((sender, receiver, sent_ns))) is not None
    ]
    mails.sort(key=lambda mail: mail.sent_ns)
    return mails, len(sent) + len(received) - 2 * len(mails)
