"""What outcomes teach: how likely accepted nodes were held to be, and how fast the engine is."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.messages import Outcome
from stages.draft_speculator.draft_request import DraftRequest, Submitted
from stages.draft_speculator.measures import Measures, Way


class Verdict(NamedTuple):
    """What became of a proposal."""

    parents: list[int]
    """Of its nodes, as in the message."""
    submitted: list[Submitted]
    """Why they were in it."""
    accepted_node: int
    """The last one that the target went on to; -1 for none."""

    def teach(self, measures: Measures) -> None:
        """Count it in the figures."""
        path = {-1, self.accepted_node}
        node = self.accepted_node
        while node >= 0:
            path.add(node)
            node = self.parents[node]
        has_children = {parent for parent in self.parents if parent in path}
        for parent in has_children:
            measures.add_continuation(was_accepted=parent != self.accepted_node)
        for index, (parent, submitted) in enumerate(zip(self.parents, self.submitted, strict=True)):
            if parent not in path:
                continue
            is_accepted = index in path
            if submitted.log_prob is not None:
                measures.calibration.add(submitted.log_prob, is_accepted=is_accepted)
            elif submitted.matched:
                measures.look_up[submitted.matched].add(is_accepted)


class RoundTally:
    """Adds up the outcomes of one forward, which is one round of all the requests that run.

    A forward is one observation, however many requests share it: its time is that of all their rows.
    """

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._last_decided_ns = 0
        """When the target had chosen in the forward before."""
        self._clear()

    def _clear(self) -> None:
        self._num_requests = self._num_accepted = 0
        self._promised = 0.0
        self._last_submitted_ns = 0
        self._due_ns = 0.0
        self._ways: set[Way | None] = set()

    def add(self, request: DraftRequest, outcome: Outcome) -> None:
        """One outcome, before its request goes on to the next round."""
        self._num_requests += 1
        self._num_accepted += outcome.num_accepted
        self._promised += request.promised
        # The forward began with the last proposal.
        self._last_submitted_ns = max(self._last_submitted_ns, request.submitted_ns)
        self._due_ns = max(self._due_ns, request.due_ns)
        if request.can_draft and not request.is_behind:
            self._ways.add(request.way)

    def end(self, outcome: Outcome) -> None:
        """The last outcome of the forward was added."""
        if self._num_requests == 0:
            return  # a stray message
        measures = self._measures
        measures.num_active = self._num_requests
        measures.reads_prompts = outcome.compute_ns == 0
        if outcome.compute_ns > 0 and self._last_decided_ns:
            measures.target.add(outcome.num_rows, outcome.compute_ns)
            if self._ways != {Way.PLAIN}:
                measures.add_turnaround(outcome.decided_ns - outcome.compute_ns - self._last_submitted_ns)
                measures.delays.add(outcome.decided_ns - self._due_ns)
            # A round in which some speculated and others could not says nothing about either.
            way = self._ways.pop() if len(self._ways) == 1 else None
            typical = measures.promises[way].settle(accepted=self._num_accepted, promised=self._promised)
            measures.add_round(
                tokens=1 + typical / self._num_requests,
                ns=outcome.decided_ns - self._last_decided_ns,
                way=way,
            )
        self._last_decided_ns = outcome.decided_ns
        self._clear()
