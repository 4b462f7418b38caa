"""Profiles written by hand: what each stage did when, in microseconds."""

from __future__ import annotations

import msgspec

from conf.schema import RunConfig
from pipeline.control import StageProfile
from pipeline.messages import Candidates, Message, Outcome, Plan, Proposal, ProposalSource, StageName
from pipeline.profiling import EngineProfile
from pipeline.spans import SpanKind, SpanRecorder
from pipeline.tensor_pool import TensorRef

VERIFIER, SPECULATOR, PREDICTOR = StageName.VERIFIER, StageName.SPECULATOR, StageName.PREDICTOR


def outcome(*, request_id: str = "r#1", round_id: int) -> Outcome:
    return Outcome(
        request_id=request_id,
        round_id=round_id,
        committed_len=10 + round_id,
        accepted_node=-1,
        bonus_token=0,
        num_accepted=0,
        num_proposed=1,
    )


def proposal(*, request_id: str = "r#1", round_id: int) -> Proposal:
    return Proposal(
        request_id=request_id,
        round_id=round_id,
        committed_len=10 + round_id,
        token_ids=[1],
        parents=[-1],
        source=ProposalSource.HIT,
        ready_length=1,
        draft_spans=[],
    )


def candidates(*, request_id: str = "r#1", round_id: int) -> Candidates:
    ref = TensorRef(pool="p", slot=0, generation=2)
    return Candidates(
        request_id=request_id,
        round_id=round_id,
        token_ids=[],
        parents=[],
        candidate_ids=ref,
        candidate_log_probs=ref,
        num_branches=4,
    )


def plan(*, request_id: str = "r#1", round_id: int) -> Plan:
    return Plan(request_id=request_id, round_id=round_id, nodes=[], token_ids=[], log_probs=[])


class HandMade:
    """A profile under construction. Times in microseconds; the profile lasts from 0 to `end_us`."""

    def __init__(self, *stages: StageName, num_spans: int = 1000) -> None:
        self._recorders = {name: SpanRecorder() for name in stages}
        for recorder in self._recorders.values():
            recorder.start(num_spans=num_spans, now_ns=0)

    def span(self, stage: StageName, kind: SpanKind, start_us: int, end_us: int, **fields: object) -> None:
        fields = {"request_id": "r#1", **fields} if kind is not SpanKind.WAIT else fields
        self._recorders[stage].add(kind, 1000 * start_us, 1000 * end_us, **fields)  # type: ignore[arg-type]

    def mail(
        self,
        sender: StageName,
        receiver: StageName,
        message: Message,
        *,
        sent_us: int,
        taken_us: int,
        received_us: int,
    ) -> None:
        """Sending takes a microsecond before and after `sent_us`."""
        self._recorders[sender].add_message(
            SpanKind.SEND,
            1000 * (sent_us - 1),
            1000 * (sent_us + 1),
            message=message,
            peer=receiver,
            sent_ns=1000 * sent_us,
        )
        self._recorders[receiver].add_message(
            SpanKind.RECEIVE,
            1000 * taken_us,
            1000 * received_us,
            message=message,
            peer=sender,
            sent_ns=1000 * sent_us,
        )

    def profile(self, *, end_us: int) -> EngineProfile:
        return EngineProfile(
            settings=msgspec.msgpack.encode(RunConfig()),
            pids={name: 100 + number for number, name in enumerate(self._recorders)},
            stages={
                name: StageProfile(spans=recorder.dump(now_ns=1000 * end_us), kernel_trace=None)
                for name, recorder in self._recorders.items()
            },
        )


def two_rounds() -> HandMade:
    """A prefill and two rounds of one request: a hit, and a miss that the target waits for.

    verifier    prefill 0-100 | commit -110 |    verify 130-330 | commit -340 |     verify 500-700 | -720
    speculator  glue 10-90    | look-up 118 | glue 125-205, branch 215-305 | look-up 360, draft 365-465 |
    predictor                               |          plan 207-211        |
    """
    made = HandMade(VERIFIER, SPECULATOR, PREDICTOR)
    made.span(VERIFIER, SpanKind.PREFILL, 0, 100, round_id=0, count=10)
    made.span(SPECULATOR, SpanKind.GLUE, 10, 90, round_id=0, count=10)
    made.mail(VERIFIER, SPECULATOR, outcome(round_id=0), sent_us=105, taken_us=114, received_us=115)
    made.span(VERIFIER, SpanKind.COMMIT, 100, 110, round_id=0, count=1)
    made.span(SPECULATOR, SpanKind.LOOKUP, 115, 118, round_id=1, count=2)
    made.mail(SPECULATOR, VERIFIER, proposal(round_id=1), sent_us=120, taken_us=124, received_us=125)
    made.span(VERIFIER, SpanKind.WAIT, 110, 124)
    made.span(VERIFIER, SpanKind.VERIFY, 130, 330, round_id=1, count=2)
    made.span(SPECULATOR, SpanKind.GLUE, 125, 205, round_id=1, count=2)
    made.mail(SPECULATOR, PREDICTOR, candidates(round_id=1), sent_us=206, taken_us=206, received_us=207)
    made.span(PREDICTOR, SpanKind.PLAN, 207, 211, round_id=1, count=4)
    made.mail(PREDICTOR, SPECULATOR, plan(round_id=1), sent_us=212, taken_us=212, received_us=214)
    made.span(SPECULATOR, SpanKind.BRANCH, 215, 265, round_id=1, count=4)
    made.span(SPECULATOR, SpanKind.BRANCH, 265, 305, round_id=1, count=4)
    made.mail(VERIFIER, SPECULATOR, outcome(round_id=1), sent_us=335, taken_us=355, received_us=357)
    made.span(VERIFIER, SpanKind.COMMIT, 330, 340, round_id=1, count=1)
    made.span(SPECULATOR, SpanKind.LOOKUP, 357, 360, round_id=2, count=0)
    made.span(SPECULATOR, SpanKind.DRAFT, 365, 465, round_id=2, count=1)
    made.mail(SPECULATOR, VERIFIER, proposal(round_id=2), sent_us=470, taken_us=490, received_us=495)
    made.span(VERIFIER, SpanKind.WAIT, 340, 490)
    made.span(VERIFIER, SpanKind.VERIFY, 500, 700, round_id=2, count=2)
    made.span(VERIFIER, SpanKind.COMMIT, 700, 720, round_id=2, count=1)
    return made
