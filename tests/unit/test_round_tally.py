"""What the speed of the engine is learned from: forwards, and which of them say nothing about it."""

from __future__ import annotations

import pytest

from pipeline.messages import Outcome
from stages.draft_speculator.draft_request import DraftRequest, Phase
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.learning import RoundTally
from stages.draft_speculator.measures import Measures, Way

MS = 1_000_000


class Engine:
    """Outcomes of forwards of 10 ms, by hand."""

    def __init__(self) -> None:
        self.measures = Measures()
        self._tally = RoundTally(self.measures)
        self._now_ns = 0

    def forward(
        self,
        requests: list[DraftRequest],
        *,
        after_ms: int = 10,
        has_read_prompt: bool = False,
        num_accepted: int = 0,
    ) -> None:
        self._now_ns += after_ms * MS
        for left, request in reversed(list(enumerate(requests))):
            outcome = Outcome(
                request_id=request.request_id,
                round_id=request.round_id,
                committed_len=4,
                accepted_node=-1,
                bonus_token=1,
                num_accepted=num_accepted,
                num_proposed=0,
                num_rows=len(requests),
                compute_ns=0 if has_read_prompt else 9 * MS,
                decided_ns=self._now_ns,
                num_following=left,
            )
            self._tally.add(request, outcome)
            request.next_round()
        self._tally.end(outcome)


def request_named(name: str) -> DraftRequest:
    tree = DraftTree([1, 2, 3], num_read=0)
    return DraftRequest(
        request_id=name, seed=0, tree=tree, max_len=64, can_draft=True, phase=Phase.ANSWERING, way=Way.PLAIN
    )


def test_the_time_until_the_next_prompt_was_read_is_no_time_of_a_round() -> None:
    engine = Engine()
    for name in "abc":
        request = request_named(name)
        engine.forward([request], after_ms=500, has_read_prompt=True)
        for _ in range(4):
            engine.forward([request])
    assert engine.measures.plain_rate == pytest.approx(1 / (10 * MS))


def test_a_forward_is_one_round_of_all_who_share_it() -> None:
    engine = Engine()
    requests = [request_named(name) for name in "abc"]
    for _ in range(8):
        engine.forward(requests)
    assert engine.measures.num_active == 3
    assert engine.measures.plain_rate == pytest.approx(1 / (10 * MS))


def test_a_round_in_which_some_rest_and_others_speculate_says_nothing_of_either() -> None:
    engine = Engine()
    resting, speculating = request_named("resting"), request_named("speculating")
    speculating.way = Way.PREPARED
    for _ in range(8):
        engine.forward([resting, speculating])
    assert engine.measures.of_way(Way.PREPARED).num_rounds == 0
    assert engine.measures.plain_rate != pytest.approx(1 / (10 * MS)), "still the target's own time"


def test_a_round_counts_for_what_its_proposals_promised_and_not_for_their_luck() -> None:
    engine, request = Engine(), request_named("speculating")
    after_luck: dict[int, list[float]] = {0: [], 3: []}
    for accepted in [0, 0, 0, 3, 3, 3] * 60:
        request.way, request.promised = Way.DRAFTED, 2.0
        engine.forward([request], num_accepted=accepted)
        after_luck[accepted].append(engine.measures.of_way(Way.DRAFTED).value * 10 * MS)
    # 2 accepted tokens were promised a round, and 1.5 came.
    assert engine.measures.of_way(Way.DRAFTED).value * 10 * MS == pytest.approx(2.5, rel=0.04)
    assert max(after_luck[3][-30:]) - min(after_luck[0][-30:]) < 0.02, "a mean of tokens varies by 0.04"
