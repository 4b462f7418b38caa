"""Lets the draft read what requests want read, and measures how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.spans import SpanKind, SpanRecorder
from stages.draft_speculator.draft_laws import fan_outs_below
from stages.draft_speculator.draft_request import DraftRequest, Phase
from stages.draft_speculator.draft_source import DraftSource, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.measures import Measures


class DraftReader:
    """The draft, as the stage uses it in each phase of a request."""

    def __init__(self, source: DraftSource, measures: Measures, spans: SpanRecorder) -> None:
        self._source = source
        self._measures = measures
        self._spans = spans

    def is_readable(self, tree: DraftTree, node: int) -> bool:
        """Whether the draft knows a position as late as the node's."""
        limit = self._source.max_position
        return limit is None or tree.positions[node] < limit

    def step(self, kind: SpanKind, requests: Sequence[DraftRequest], *, choosing_ns: int = 0) -> None:
        """Read what the requests' phases want read, in one draft step; nothing if that is nothing.

        choosing_ns: what it took to choose that, which is part of what a step costs.
        """
        start_ns = time.monotonic_ns()
        nodes = [self._nodes_to_read(request) for request in requests]
        num_rows = self._read(kind, requests, nodes)
        if num_rows:
            self._measures.step.add(num_rows, choosing_ns + time.monotonic_ns() - start_ns)
        for request in requests:
            request.pending = []

    def read_chunk(self, requests: Sequence[DraftRequest], *, size: int) -> None:
        """Read up to `size` committed tokens, those of the first request first."""
        nodes: list[list[int]] = []
        for request in requests:
            nodes.append(request.tree.unread_committed()[:size])
            size -= len(nodes[-1])
        # How long it takes says little about steps.
        self._read(SpanKind.READ, requests, nodes)

    def _nodes_to_read(self, request: DraftRequest) -> list[int]:
        """What the request's phase reads next; committed tokens that are not read always come first."""
        tree = request.tree
        below = tree.proposal if request.phase is Phase.GLUING else request.pending
        unread = [
            node
            for node in below
            if node > tree.root and not tree.is_read[node] and self.is_readable(tree, node)
        ]
        return [*tree.unread_committed(), *sorted(unread)]

    def _read(self, kind: SpanKind, requests: Sequence[DraftRequest], nodes: Sequence[list[int]]) -> int:
        """Read these nodes of each request. Returns how many there were."""
        reading = [(request, wanted) for request, wanted in zip(requests, nodes, strict=True) if wanted]
        if not reading:
            return 0
        jobs = [
            ExtendJob(
                request_id=request.request_id,
                tree=request.tree,
                nodes=wanted,
                fan_outs=fan_outs_below(
                    request.tree,
                    wanted,
                    anchors=[branch.node for branch in request.branches],
                    by_depth=request.fan_outs,
                ),
            )
            for request, wanted in reading
        ]
        start_ns = time.monotonic_ns()
        self._source.extend(jobs)
        span = (start_ns, time.monotonic_ns())
        num_rows = sum(len(job.nodes) for job in jobs)
        if self._spans.is_on:
            first = reading[0][0]
            self._spans.add(kind, *span, request_id=first.request_id, round_id=first.round_id, count=num_rows)
        for request, _ in reading:
            request.spans.append(span)
            # Shifts tree indices only where committed tokens were unread, and then no chain and no
            # branch exists yet that could hold one.
            request.tree.drop_read_prefix()
        return num_rows
