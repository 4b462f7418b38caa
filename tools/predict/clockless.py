"""The engine without a clock: the real stages in one thread, where the draft always finishes first.

The verifier gets to work only when nobody else has any. So every branch of a plan is drafted before the
outcome is known, and the figures are those of the policy: no speed of any machine is in them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from conf.schema import FanOut, RunConfig
from pipeline.errors import RequestError
from pipeline.inprocess import InProcess
from pipeline.messages import RequestFailed, RequestFinished, StageName, SubmitRequest, TextBlock
from pipeline.stage import Stage, StageContext
from stages import detokenizer, tokenizer
from stages.draft_speculator import stage as draft_speculator
from stages.outcome_predictor import stage as outcome_predictor
from stages.target_verifier import stage as target_verifier
from tools.predict.cells import AnswerCounts
from tools.predict.watch import PlanBox, WatchedPredictor

StageFactory = Callable[[StageContext], Stage]
STAGES: Mapping[StageName, StageFactory] = {
    StageName.TOKENIZER: tokenizer.build,
    StageName.DETOKENIZER: detokenizer.build,
    StageName.SPECULATOR: draft_speculator.build,
    StageName.PREDICTOR: outcome_predictor.build,
    StageName.VERIFIER: target_verifier.build,
}
"""In the order in which they are offered work; the verifier comes last."""


class ClocklessEngine:
    """Answers one request after the other. A context manager."""

    def __init__(
        self,
        config: RunConfig,
        stages: Mapping[StageName, StageFactory] = STAGES,
        *,
        shadow_policies: Sequence[FanOut] = tuple(FanOut),
    ) -> None:
        """config: resolved, a run that prepares outcomes. shadow_policies: plan its rounds for comparison."""
        self._watch: WatchedPredictor | None = None
        build_predictor = stages[StageName.PREDICTOR]

        def watched(context: StageContext) -> Stage:
            shadows = {
                policy.value: _shadow(build_predictor, config, context, policy) for policy in shadow_policies
            }
            self._watch = WatchedPredictor(
                build_predictor(context), shadows, max_rank=config.speculation.budget
            )
            return self._watch

        self._runtime = InProcess({**stages, StageName.PREDICTOR: watched}, msgspec.msgpack.encode(config))

    def __enter__(self) -> Self:
        self._runtime.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runtime.close()

    def answer(self, request: SubmitRequest, *, index: int) -> AnswerCounts:
        """Run one request to its end. Raises `RequestError` if it fails, and what the stages raise.

        index: of its prompt.
        """
        runtime = self._runtime
        assert self._watch is not None, "started by __enter__"
        self._watch.begin()
        runtime.outputs.clear()
        runtime.send(StageName.TOKENIZER, request)
        runtime.run_until_idle()
        for sender, error in runtime.protocol_errors:
            raise RequestError(f"{sender.value}: {error}")
        return _counts(runtime.outputs, self._watch, index=index)


def _shadow(
    build: StageFactory, config: RunConfig, context: StageContext, policy: FanOut
) -> tuple[Stage, PlanBox]:
    """A predictor with another policy, whose plans go nowhere."""
    config = copy.deepcopy(config)
    config.speculation.fan_out = policy
    box = PlanBox()
    settings = msgspec.msgpack.encode(config)
    return build(StageContext(outbox=box, pools=context.pools, settings=settings)), box


def _counts(outputs: Sequence[object], watch: WatchedPredictor, *, index: int) -> AnswerCounts:
    token_ids: list[int] = []
    for event in outputs:
        match event:
            case RequestFailed():
                raise RequestError(event.reason)
            case TextBlock():
                token_ids += event.token_ids
            case RequestFinished():
                metrics = event.metrics
                hits = metrics.cache_hits or 0
                return AnswerCounts(
                    index=index,
                    token_ids=token_ids,
                    num_rounds=metrics.num_rounds,
                    hits=hits,
                    misses=metrics.cache_misses or 0,
                    ready_tokens=round(hits * (metrics.mean_ready_length or 0)),
                    rank_counts=watch.rank_counts,
                    planned=watch.planned,
                )
    raise RequestError("the request did not end")
