"""The engine without a clock, on tiny models: figures that repeat themselves, tokens of plain decoding."""

from __future__ import annotations

import pytest
import torch

from conf.schema import FanOut, RunConfig, TreeConfig
from pipeline.errors import RequestError
from pipeline.messages import (
    Committed,
    RequestFinished,
    Sampling,
    StageName,
    SubmitRequest,
    TextBlock,
    TokenizedRequest,
    TokenizerMessage,
)
from pipeline.stage import Outbox, Stage
from stages.draft_speculator.stage import DraftSpeculator
from stages.outcome_predictor import stage as outcome_predictor
from stages.target_verifier.stage import TargetVerifier
from tests.tiny import PlainDecoder, draft_by_name, make_config, tiny_target
from tools.predict.cells import AnswerCounts
from tools.predict.clockless import ClocklessEngine

PROMPT = [17, 3, 99, 42, 8, 17, 3]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class _NumberTokenizer(Stage):
    """Prompts are token ids in decimal."""

    accepts = TokenizerMessage

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def setup(self) -> None:
        pass

    def handle(self, message: TokenizerMessage) -> None:
        assert isinstance(message, SubmitRequest)
        tokenized = TokenizedRequest(
            request_id=message.request_id,
            prompt_token_ids=[int(word) for word in (message.prompt or "").split()],
            sampling=message.sampling,
            submitted_ns=0,
        )
        self._outbox.send(StageName.VERIFIER, tokenized)

    def close(self) -> None:
        pass


class _TextlessDetokenizer(Stage):
    """Passes token ids on."""

    accepts = Committed

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def setup(self) -> None:
        pass

    def handle(self, message: Committed) -> None:
        block = TextBlock(
            request_id=message.request_id, text="", token_ids=message.token_ids, source=message.source
        )
        self._outbox.send(StageName.FRONTEND, block)
        if message.metrics is not None and message.finish_reason is not None:
            finished = RequestFinished(
                request_id=message.request_id,
                finish_reason=message.finish_reason,
                text="",
                num_prompt_tokens=message.num_prompt_tokens,
                num_output_tokens=0,
                metrics=message.metrics,
            )
            self._outbox.send(StageName.FRONTEND, finished)

    def close(self) -> None:
        pass


def _engine(config: RunConfig, draft: str) -> ClocklessEngine:
    target = tiny_target()
    return ClocklessEngine(
        config,
        {
            StageName.TOKENIZER: lambda context: _NumberTokenizer(context.outbox),
            StageName.DETOKENIZER: lambda context: _TextlessDetokenizer(context.outbox),
            StageName.SPECULATOR: lambda c: DraftSpeculator(config, c, draft_by_name(draft, target)),
            StageName.PREDICTOR: outcome_predictor.build,
            StageName.VERIFIER: lambda context: TargetVerifier(config, context, target),
        },
    )


def _config(fan_out: FanOut, *, tree: bool = False) -> RunConfig:
    config = make_config(prepare_outcomes=True, depth=3, budget=8)
    config.speculation.fan_out = fan_out
    if tree:
        config.speculation.tree = TreeConfig(nodes=5)
    return config


def _sampling(max_tokens: int = 40) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=1.0, seed=11)


def _answers(config: RunConfig, draft: str = "noisy") -> list[AnswerCounts]:
    """Of two requests, one after the other."""
    request = SubmitRequest(
        request_id="r", prompt=" ".join(map(str, PROMPT)), sampling=_sampling(), submitted_ns=0
    )
    with _engine(config, draft) as engine:
        return [engine.answer(request, index=index) for index in (0, 1)]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("fan_out", list(FanOut))
def test_figures_repeat_themselves_and_tokens_are_those_of_plain_decoding(
    fan_out: FanOut, tree: bool
) -> None:
    answers = _answers(_config(fan_out, tree=tree))
    assert answers == _answers(_config(fan_out, tree=tree))
    expected = PlainDecoder(tiny_target()).generate(PROMPT, _sampling())
    assert [answer.token_ids for answer in answers] == [expected, expected]
    for answer in answers:
        # Every round but the prefill began with a look-up.
        assert answer.hits + answer.misses == answer.num_rounds - 1
        assert 0 < answer.hits <= answer.planned[fan_out.value] <= answer.num_planned


def test_every_branch_is_drafted_to_its_end() -> None:
    """A draft that is the target: after a hit all three tokens are ready, but for those at the very end."""
    (first, _) = _answers(_config(FanOut.calibrated), draft="oracle")
    assert first.hits > 5
    assert 3 * first.hits - 2 <= first.ready_tokens <= 3 * first.hits


def test_the_policy_that_runs_plans_what_its_shadow_plans() -> None:
    """So every planned outcome was a hit, but for those at the end that leave no room for a token."""
    for fan_out in FanOut:
        for answer in _answers(_config(fan_out)):
            assert answer.planned[fan_out.value] - answer.hits in (0, 1)


def test_a_request_that_is_refused_ends_with_its_reason() -> None:
    request = SubmitRequest(request_id="r", prompt="400", sampling=_sampling(), submitted_ns=0)
    with _engine(_config(FanOut.uniform), "noisy") as engine, pytest.raises(RequestError, match="400"):
        engine.answer(request, index=0)
