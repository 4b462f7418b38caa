"""What each decode round consisted of, read off a timeline.

A round lasts from the last commit of the round before to its own last commit. The target's side is the spine:
every instant of a round is charged to exactly one cause. Where the target waits, that is the last proposal
while it is under way, whatever the draft does by then; before, it is the first in the order of `Cause` that
goes on: an outcome that waits for a busy draft is charged to the draft. A round with several requests is one
round, as it is one forward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

from pipeline.messages import StageName
from pipeline.spans import Span, SpanKind
from stages.target_verifier.round_clock import idle_spans, merge_spans
from tools.profile.timeline import DRAFT_KINDS, Interval, Timeline

_VERIFIER, _SPECULATOR, _PREDICTOR = StageName.VERIFIER, StageName.SPECULATOR, StageName.PREDICTOR


class Cause(str, Enum):
    """What an instant of a round is charged to."""

    TARGET = "target"
    """The target's forward, the choice of tokens, and the KV moves."""
    VERIFIER = "verifier"
    """The verifier's own work around the forward: commits, mail, preparing the next forward."""
    DRAFT = "draft"
    """The target waits while the draft computes: the proposal, or a branch step that has to end first."""
    GLUE = "glue"
    """The target waits while the draft reads what it proposed."""
    SPECULATOR = "speculator"
    """The target waits while the speculator looks up, selects, or handles mail."""
    PREDICTOR = "predictor"
    """The target waits while the predictor works, on a core that it shares with the speculator."""
    MESSAGES = "messages"
    """The target waits while a message between verifier and speculator is under way."""
    OTHER = "other"
    """The target waits, and nothing that was recorded says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One target forward that verified proposals, or a root alone. Times in ns."""

    request_id: str
    """Of the first request."""
    round_id: int
    num_requests: int
    start_ns: int
    end_ns: int
    ready_length: int | None
    """Tokens that were ready for the first request; 0 is a miss, None says that there is no cache."""
    cause_ns: Mapping[Cause, int]
    """Adds up to the round."""
    draft_compute_ns: int
    draft_wait_ns: int
    """The speculator waits for a plan."""
    draft_idle_ns: int
    """The speculator waits, for nothing that it asked for."""
    at_once_ns: int
    """Target and draft compute at the same time."""

    @property
    def length_ns(self) -> int:
        """From commit to commit."""
        return self.end_ns - self.start_ns

    @property
    def bound_by(self) -> Cause:
        """What most of the round is charged to."""
        return max(self.cause_ns, key=lambda cause: self.cause_ns[cause])

    @property
    def wait_ns(self) -> int:
        """The target waits for another stage or for mail."""
        waits = (Cause.DRAFT, Cause.GLUE, Cause.SPECULATOR, Cause.PREDICTOR, Cause.MESSAGES)
        return sum(self.cause_ns[cause] for cause in waits)

    @property
    def overhead_ns(self) -> int:
        """Neither the target nor a draft that it waits for computes."""
        computes = (Cause.TARGET, Cause.DRAFT, Cause.GLUE)
        return self.length_ns - sum(self.cause_ns[cause] for cause in computes)


def find_rounds(timeline: Timeline) -> list[Round]:
    """The decode rounds that lie whole in the profile, in order."""
    activity = _Activity(timeline)
    return [
        activity.describe(verify, commits, window)
        for verify, commits, window in _windows(timeline)
        if timeline.window[0] <= window[0] and window[1] <= timeline.window[1]
    ]


def _windows(timeline: Timeline) -> list[tuple[Span, list[Span], Interval]]:
    """Each verification with its commits, and the time since the end of what the target did before."""
    found: list[tuple[Span, list[Span], Interval]] = []
    forward: Span | None = None
    commits: list[Span] = []
    last_end: int | None = None

    def close() -> None:
        nonlocal last_end
        if forward is None or not commits:
            return
        end = max(span.end_ns for span in commits)
        if forward.kind is SpanKind.VERIFY and last_end is not None:
            found.append((forward, commits, (last_end, end)))
        last_end = end

    for span in timeline.of_kind(_VERIFIER, SpanKind.PREFILL, SpanKind.VERIFY, SpanKind.COMMIT):
        if span.kind is SpanKind.COMMIT:
            commits.append(span)
        else:
            close()
            forward, commits = span, []
    close()
    return found


class _Activity:
    """Who was busy with what when, over a whole timeline."""

    def __init__(self, timeline: Timeline) -> None:
        verifier = busy_intervals(timeline.spans.get(_VERIFIER, ()))
        verify = _intervals(timeline.of_kind(_VERIFIER, SpanKind.VERIFY))
        noise = _intervals(timeline.of_kind(_VERIFIER, SpanKind.NOISE))
        glue = _intervals(timeline.of_kind(_SPECULATOR, SpanKind.GLUE))
        self._draft = _intervals(timeline.of_kind(_SPECULATOR, *DRAFT_KINDS))
        self._speculator = busy_intervals(timeline.spans.get(_SPECULATOR, ()))
        self._verify = verify
        between = {_VERIFIER, _SPECULATOR}
        mails = [mail for mail in timeline.mails if {mail.sender, mail.receiver} == between]
        proposals = [mail for mail in mails if mail.receiver is _VERIFIER]
        self._proposals = sorted((mail.received_ns, mail.sent_ns) for mail in proposals)
        self._by_cause = {
            Cause.TARGET: verify,
            # Noise is made where the target would only wait.
            Cause.VERIFIER: outside(verifier, merge_spans([*verify, *noise])),
            Cause.DRAFT: outside(self._draft, glue),
            Cause.GLUE: glue,
            Cause.SPECULATOR: outside(self._speculator, self._draft),
            Cause.PREDICTOR: busy_intervals(timeline.spans.get(_PREDICTOR, ())),
            Cause.MESSAGES: merge_spans((mail.sent_ns, mail.received_ns) for mail in mails),
        }
        self._planning = _waits_for_plan(timeline)
        self._lookups = {
            (span.request_id, span.round_id): span.count
            for span in timeline.of_kind(_SPECULATOR, SpanKind.LOOKUP)
        }

    def describe(self, verify: Span, commits: Sequence[Span], window: Interval) -> Round:
        """One round."""
        cause_ns = self._charge(window, self._proposal_under_way(window, verify))
        draft = _clipped(self._draft, window)
        draft_waits = outside([window], _part(self._speculator, window))
        idle = outside(draft_waits, _part(self._planning, window))
        return Round(
            request_id=verify.request_id,
            round_id=verify.round_id,
            num_requests=len(commits),
            start_ns=window[0],
            end_ns=window[1],
            # The outcome of a round is looked up for the next one.
            ready_length=self._lookups.get((verify.request_id, verify.round_id)),
            cause_ns=cause_ns,
            draft_compute_ns=length_ns(draft),
            draft_wait_ns=length_ns(draft_waits) - length_ns(idle),
            draft_idle_ns=length_ns(idle),
            at_once_ns=length_ns(draft) - length_ns(outside(draft, _part(self._verify, window))),
        )

    def _charge(self, window: Interval, proposal: Sequence[Interval]) -> dict[Cause, int]:
        """What each instant of a round is charged to. proposal: when its last proposal was under way."""
        cause_ns = dict.fromkeys(Cause, 0)
        left = [window]

        def take(cause: Cause, busy: Sequence[Interval]) -> None:
            nonlocal left
            remaining = outside(left, busy)
            cause_ns[cause] += length_ns(left) - length_ns(remaining)
            left = remaining

        for cause, busy in self._by_cause.items():
            take(cause, _part(busy, window))
            if cause is Cause.VERIFIER:
                take(Cause.MESSAGES, proposal)
        cause_ns[Cause.OTHER] = length_ns(left)
        return cause_ns

    def _proposal_under_way(self, window: Interval, verify: Span) -> list[Interval]:
        """When the last proposal that a verification waited for was under way."""
        index = bisect_right(self._proposals, verify.start_ns, key=itemgetter(0)) - 1
        if index < 0:
            return []
        received_ns, sent_ns = self._proposals[index]
        return [(sent_ns, received_ns)] if received_ns > window[0] else []


def _waits_for_plan(timeline: Timeline) -> list[Interval]:
    """From each message with candidates to the plan that answers it."""
    plans = {
        (mail.request_id, mail.round_id): mail.received_ns
        for mail in timeline.mails
        if mail.message == "Plan"
    }
    return merge_spans(
        (mail.sent_ns, plans[mail.request_id, mail.round_id])
        for mail in timeline.mails
        if mail.message == "Candidates" and (mail.request_id, mail.round_id) in plans
    )


def outside(intervals: Iterable[Interval], busy: Sequence[Interval]) -> list[Interval]:
    """The parts of some intervals that lie in none of `busy`; both ascending and disjoint."""
    return [idle for interval in intervals for idle in idle_spans(interval, _part(busy, interval))]


def length_ns(intervals: Iterable[Interval]) -> int:
    """Total time of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def _clipped(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    start, end = window
    return [(max(start, s), min(end, e)) for s, e in _part(intervals, window)]


def _part(intervals: Sequence[Interval], window: Interval) -> Sequence[Interval]:
    """Those of ascending, disjoint intervals that reach into a window."""
    first = bisect_left(intervals, window[0], key=itemgetter(1))
    last = bisect_left(intervals, window[1], key=itemgetter(0))
    return intervals[first:last]


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return merge_spans((span.start_ns, span.end_ns) for span in spans)


def busy_intervals(spans: Iterable[Span]) -> list[Interval]:
    """When a stage did anything but wait."""
    return _intervals(span for span in spans if span.kind is not SpanKind.WAIT)
