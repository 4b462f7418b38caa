"""What a forward of the target computes: rounds of the running, and no more than a chunk of prompts."""

from __future__ import annotations

from typing import cast

import torch

from pipeline.messages import Proposal, ProposalSource, Sampling
from stages.model.pages import KVHandle
from stages.model.token_law import TokenLaw
from stages.target_verifier.round_batch import pack
from stages.target_verifier.round_clock import RoundClock
from stages.target_verifier.schedule import Step, next_step
from stages.target_verifier.sequence import Sequence
from stages.target_verifier.stopping import StopRules


def _sequence(name: str, size: int, *, prefilled: int = 0, round_id: int = 0) -> Sequence:
    return Sequence(
        request_id=name,
        draft_id=name,
        sampling=Sampling(max_tokens=1, temperature=0.0, seed=1),
        prefill_len=size if round_id == 0 else 0,
        token_ids=list(range(size)),
        num_prompt_tokens=size,
        max_len=1000,
        kv=KVHandle(
            pages=list(range(100)), page_size=16, max_slots=1600, digests=[], device=torch.device("cpu")
        ),
        law=cast(TokenLaw, None),
        stop_rules=cast(StopRules, None),
        clock=cast(RoundClock, None),
        num_prefilled=prefilled,
        round_id=round_id,
    )


def _propose(sequence: Sequence, token_ids: list[int]) -> Sequence:
    sequence.proposal = Proposal(
        request_id=sequence.draft_id,
        round_id=sequence.round_id,
        committed_len=len(sequence.token_ids),
        token_ids=token_ids,
        parents=list(range(-1, len(token_ids) - 1)),
        source=ProposalSource.HIT,
        ready_length=len(token_ids),
        draft_spans=[],
    )
    return sequence


def _step(*sequences: Sequence, chunk: int = 10) -> Step:
    step = next_step(sequences, has_draft=True, chunk_size=chunk)
    assert step is not None
    return step


def _chunks(step: Step) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in step.chunks]


def test_a_long_prompt_is_read_in_chunks() -> None:
    sequence = _sequence("a", 25)
    read = []
    while not read or not read[-1].is_last:
        (chunk,) = _step(sequence).chunks
        read.append(chunk)
        sequence.num_prefilled = chunk.end
    assert [(chunk.start, chunk.end) for chunk in read] == [(0, 10), (10, 20), (20, 25)]


def test_prompts_share_a_chunk_as_far_as_their_own_chunks_fit_whole() -> None:
    """c waits although 4 tokens would fit: its chunks, and so its KV, are the same whatever else runs."""
    step = _step(_sequence("a", 23, prefilled=20), _sequence("b", 3), _sequence("c", 30), _sequence("d", 4))
    assert _chunks(step) == [("a", 20, 23), ("b", 0, 3), ("d", 0, 4)]


def test_a_chunk_waits_for_the_round_that_it_shares_a_forward_with() -> None:
    running, prompt = _sequence("r", 12, round_id=3), _sequence("p", 30)
    assert next_step([running, prompt], has_draft=True, chunk_size=10) is None
    step = _step(_propose(running, [7, 8]), prompt)
    assert (step.rounds, _chunks(step)) == ([running], [("p", 0, 10)])


def test_a_resting_request_waits_for_nothing() -> None:
    running = _sequence("r", 12, round_id=3)
    running.is_resting = True
    assert _step(running).rounds == [running]


def test_nothing_is_computed_for_nobody() -> None:
    assert next_step([], has_draft=False, chunk_size=10) is None


def test_rounds_come_first_and_only_the_end_of_a_prompt_has_logits() -> None:
    running = _propose(_sequence("r", 12, round_id=3), [70, 80])
    batch = pack(_step(running, _sequence("p", 30, prefilled=10), _sequence("q", 2), chunk=20))
    assert batch.token_ids == [11, 70, 80, *range(10, 30)]
    assert batch.positions == [11, 12, 13, *range(10, 30)]
    assert [(s.prefix_len, s.tail_len) for s in batch.sequences] == [(11, 3), (10, 20)]
    assert batch.logit_rows == [0, 1, 2, 22]
    batch = pack(_step(running, _sequence("p", 30)))
    assert batch.logit_rows == [0, 1, 2], "its prompt goes on"
    assert pack(_step(running)).logit_rows is None


def test_a_request_that_was_pre_empted_is_read_again_in_chunks() -> None:
    running, again = _propose(_sequence("a", 5, round_id=2), [7]), _sequence("b", 14, round_id=3)
    again.begin("b#2", again.kv)
    step = _step(running, again)
    assert (step.rounds, _chunks(step)) == ([running], [("b", 0, 10)])
    assert step.chunks[0].is_first
    again.num_prefilled = 10
    assert _chunks(_step(running, again)) == [("b", 10, 14)]
    again.num_prefilled = 14
    assert next_step([running, again], has_draft=True, chunk_size=10) is None, "it waits for its proposal"


def test_a_step_drops_those_that_lost_their_pages() -> None:
    running, reading = _propose(_sequence("a", 5, round_id=2), [7]), _sequence("b", 14)
    step = _step(running, reading)
    assert step.of_those([running, reading]) == step
    assert step.of_those([reading]).rounds == []
    assert step.of_those([running]).chunks == []
    assert step.of_those([]).num_rows == 0
