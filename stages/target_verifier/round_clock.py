"""Times and counts of one request, from which its `RequestMetrics` come.

All times are `time.monotonic_ns()`. Three kinds of time fill the decode phase: the target computes, the
target waits while the draft computes, and the rest, which is the pipeline's own overhead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.messages import PlanFigures, Proposal, ProposalSource, RequestMetrics

Span = tuple[int, int]


def overlap_ns(spans: Iterable[Span], others: Iterable[Span]) -> int:
    """Total time that lies in both of two lists of disjoint spans."""
    others = list(others)
    return sum(max(0, min(end, e) - max(start, s)) for start, end in spans for s, e in others)


def idle_spans(window: Span, busy: Iterable[Span]) -> list[Span]:
    """The parts of `window` outside the ascending, disjoint spans of `busy`."""
    start, end = window
    idle: list[Span] = []
    for busy_start, busy_end in busy:
        if busy_end <= start or busy_start >= end:
            continue
        if busy_start > start:
            idle.append((start, busy_start))
        start = max(start, busy_end)
    if start < end:
        idle.append((start, end))
    return idle


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, ascending and disjoint."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class TargetClock:
    """When the target computed: shared by all requests of a verifier."""

    _KEPT_SPANS = 64
    """Enough to cover the spans of the draft's last round."""

    def __init__(self) -> None:
        self.compute_ns = 0
        self.recent_spans: deque[Span] = deque(maxlen=self._KEPT_SPANS)

    def add(self, start_ns: int, end_ns: int) -> None:
        """The target computed from start to end."""
        self.compute_ns += end_ns - start_ns
        self.recent_spans.append((start_ns, end_ns))

    def spans_since(self, start_ns: int) -> list[Span]:
        """Those of the recent spans that end later."""
        spans: list[Span] = []
        for span in reversed(self.recent_spans):
            if span[1] <= start_ns:
                break
            spans.append(span)
        return spans[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartedRound:
    """What a round adds to the figures once it is committed."""

    source: ProposalSource | None
    ready_length: int
    wait_ns: int
    draft_wait_ns: int
    overlap_ns: int
    is_resting: bool


class RoundClock:
    """Times and counts of one request. A round counts when it ends: one that a cancel cut off does not."""

    def __init__(self, *, submitted_ns: int, target: TargetClock, has_cache: bool) -> None:
        self.num_cached_prompt_tokens = 0
        self.num_preemptions = 0
        self._submitted_ns = submitted_ns
        self._target = target
        self._has_cache = has_cache
        self._decode_start_ns = 0
        self._compute_ns_at_start = 0
        self._last_commit_ns = 0
        self._compute_ns_at_last_commit = 0
        self._started: _StartedRound | None = None
        self._wait_ns = 0
        self._draft_wait_ns = 0
        self._overlap_ns = 0
        self._num_rounds = 0
        self._num_proposed = 0
        self._num_accepted = 0
        self._num_output = 0
        self._hits = 0
        self._misses = 0
        self._ready_lengths = 0
        self._num_rest_rounds = 0
        self._plan: PlanFigures | None = None

    def end_prefill(self, now_ns: int) -> None:
        """The first token is committed."""
        self._num_rounds = 1
        self._num_output = 1
        self._decode_start_ns = self._last_commit_ns = now_ns
        self._compute_ns_at_start = self._compute_ns_at_last_commit = self._target.compute_ns

    def start_round(
        self,
        proposal: Proposal | None,
        *,
        draft_spans: Sequence[Span],
        now_ns: int,
        has_waited: bool,
        plan: PlanFigures | None = None,
        is_resting: bool = False,
    ) -> None:
        """The target begins to verify.

        has_waited: whether any request of the round had to be proposed for.
        plan: what the round was planned by, where that is known.
        draft_spans: when the draft computed for any request of the round since its last proposal: all of
            them wait for the slowest, so all share the wait.
        """
        # With several requests the target may have prefilled another one in the meantime.
        waited = idle_spans((self._last_commit_ns, now_ns), self._target.spans_since(self._last_commit_ns))
        own_spans = [] if proposal is None else proposal.draft_spans
        first_ns = max(own_spans[0][0] if own_spans else now_ns, self._decode_start_ns)
        decoding = [s for s in self._target.spans_since(first_ns) if s[0] >= self._decode_start_ns]
        self._started = _StartedRound(
            source=None if proposal is None or is_resting else proposal.source,
            ready_length=0 if proposal is None else proposal.ready_length,
            wait_ns=sum(end - start for start, end in waited) if has_waited else 0,
            draft_wait_ns=overlap_ns(draft_spans, waited),
            overlap_ns=overlap_ns(own_spans, decoding),
            is_resting=is_resting,
        )
        self._plan = plan or self._plan

    def end_round(self, *, num_proposed: int, num_accepted: int, num_committed: int, now_ns: int) -> None:
        """The started round is committed; the counts are those left after truncation."""
        started = self._started
        assert started is not None, "a round ends that did not start"
        self._started = None
        self._wait_ns += started.wait_ns
        self._draft_wait_ns += started.draft_wait_ns
        self._overlap_ns += started.overlap_ns
        if started.source is ProposalSource.HIT:
            self._hits += 1
            self._ready_lengths += started.ready_length
        elif started.source is ProposalSource.BACKUP:
            self._misses += 1
        self._num_rounds += 1
        self._num_rest_rounds += started.is_resting
        self._num_proposed += num_proposed
        self._num_accepted += num_accepted
        self._num_output += num_committed
        self._last_commit_ns = now_ns
        self._compute_ns_at_last_commit = self._target.compute_ns

    def metrics(self) -> RequestMetrics:
        """The figures so far."""
        decode_ns = self._last_commit_ns - self._decode_start_ns
        compute_ns = self._compute_ns_at_last_commit - self._compute_ns_at_start
        has_decoded = self._num_rounds > 1
        num_lookups = self._hits + self._misses
        return RequestMetrics(
            num_rounds=self._num_rounds,
            num_proposed_tokens=self._num_proposed,
            num_accepted_tokens=self._num_accepted,
            acceptance_length=self._num_output / self._num_rounds if self._num_rounds else None,
            acceptance_rate=self._num_accepted / self._num_proposed if self._num_proposed else None,
            cache_hits=self._hits if self._has_cache else None,
            cache_misses=self._misses if self._has_cache else None,
            hit_rate=self._hits / num_lookups if num_lookups else None,
            num_cached_prompt_tokens=self.num_cached_prompt_tokens,
            num_preemptions=self.num_preemptions,
            num_rest_rounds=self._num_rest_rounds,
            plan=self._plan,
            mean_ready_length=self._ready_lengths / self._hits if self._hits else None,
            ttft_ms=((self._decode_start_ns or time.monotonic_ns()) - self._submitted_ns) / 1e6,
            decode_seconds=decode_ns / 1e9 if has_decoded else None,
            tokens_per_second=(self._num_output - 1) / (decode_ns / 1e9) if has_decoded else None,
            target_compute_ms=compute_ns / 1e6,
            target_wait_ms=self._wait_ns / 1e6,
            draft_wait_ms=self._draft_wait_ns / 1e6,
            overlap_ms=self._overlap_ns / 1e6,
            overhead_ms=(decode_ns - compute_ns - self._draft_wait_ns) / 1e6,
        )
