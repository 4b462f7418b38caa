"""What the speed of the engine is learned from: forwards, and which of them say nothing about it."""

from __future__ import annotations

import pytest

from pipeline.messages import Outcome
from stages.draft_speculator.draft_request import DraftRequest, Phase
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.learning import RoundTally
from stages.draft_speculator.measures import Measures

MS = 1_000_000


class Engine:
    """Outcomes of forwards of 10 ms, by hand."""

    def __init__(self) -> None:
        self.measures = Measures()
        self._tally = RoundTally(self.measures)
        self._now_ns = 0

    def forward(self, requests: list[DraftRequest], *, after_ms: int = 10) -> None:
        self._now_ns += after_ms * MS
        for left, request in reversed(list(enumerate(requests))):
            outcome = Outcome(
                request_id=request.request_id,
                round_id=request.round_id,
                committed_len=4,
                accepted_node=-1,
                bonus_token=1,
                num_accepted=0,
                num_proposed=0,
                num_rows=len(requests),
                compute_ns=9 * MS,
                decided_ns=self._now_ns,
                num_following=left,
            )
            self._tally.add(request, outcome)
            request.next_round()
        self._tally.end(outcome)


def request_named(name: str) -> DraftRequest:
    tree = DraftTree([1, 2, 3], num_read=0)
    return DraftRequest(
        request_id=name, seed=0, tree=tree, max_len=64, can_draft=True, phase=Phase.ANSWERING, is_resting=True
    )


def test_the_time_before_a_request_that_comes_alone_is_no_time_of_a_round() -> None:
    engine = Engine()
    for name in "abc":
        request = request_named(name)
        engine.forward([request], after_ms=500)  # its prompt was read meanwhile
        for _ in range(4):
            engine.forward([request])
    assert engine.measures.plain_rate == pytest.approx(1 / (10 * MS))


def test_a_round_that_one_request_joins_counts() -> None:
    engine = Engine()
    running = request_named("running")
    for number in range(8):
        engine.forward([running, request_named(f"joins-{number}")])
    assert engine.measures.plain_rate == pytest.approx(1 / (10 * MS))
    assert engine.measures.num_active == 2
