"""Requests from admission to end: stops at every offset, limits, batch mates, cancels, late messages."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from conf.schema import FanOut, RunConfig, TreeConfig
from pipeline.errors import EngineDead
from pipeline.messages import (
    CancelRequest,
    FinishReason,
    Outcome,
    Plan,
    Proposal,
    ProposalSource,
    RequestFailed,
    Sampling,
    StageName,
)
from stages.draft_speculator.draft_request import Phase
from stages.draft_speculator.model_draft import ModelDraft
from stages.draft_speculator.planner import Planner
from stages.draft_speculator.stage import DraftSpeculator
from stages.model.weights import random_model
from stages.outcome_predictor.stage import OutcomePredictor
from stages.target_verifier.stage import TargetVerifier
from tests.tiny import (
    PlainDecoder,
    ScriptedDraft,
    TinyPipeline,
    draft_by_name,
    make_config,
    tiny_runner,
    tiny_shape,
    tiny_target,
)

PROMPT = [17, 3, 99, 42, 8, 17, 3]
PROMPTS = {"a": PROMPT, "b": [5, 6, 7], "c": list(range(40, 70)), "d": [120], "e": [9, 9, 9, 9]}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _greedy(max_tokens: int = 24) -> Sampling:
    return Sampling(max_tokens=max_tokens, seed=0)


def _ssd(**kwargs: int) -> RunConfig:
    config = make_config(prepare_outcomes=True, **kwargs)  # type: ignore[arg-type]
    config.speculation.fan_out = FanOut.geometric
    return config


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("offset", range(9))
def test_end_of_sequence_at_every_offset_of_a_block(offset: int, prepare: bool) -> None:
    """Tokens, counts and finish reason agree, wherever in an accepted block the end stands."""
    target = tiny_target()
    output = PlainDecoder(target).generate(PROMPT, _greedy())
    end = next(i for i in range(offset, len(output)) if output[i] not in output[:i])
    target = replace(target, shape=replace(target.shape, eos_token_ids=(output[end],)))
    pipeline = TinyPipeline(make_config(prepare_outcomes=prepare), target, draft_by_name("oracle", target))
    assert pipeline.generate(PROMPT, _greedy()) == output[: end + 1]
    last = pipeline.recorder.end("r")
    assert last is not None
    assert last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("draft", ["oracle", "noisy", "anti"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7])
def test_max_tokens_is_kept_and_counts_reconcile(max_tokens: int, draft: str) -> None:
    target = tiny_target()
    expected = PlainDecoder(target).generate(PROMPT, _greedy(max_tokens))
    pipeline = TinyPipeline(_ssd(), target, draft_by_name(draft, target))
    assert pipeline.generate(PROMPT, _greedy(max_tokens)) == expected
    last = pipeline.recorder.end("r")
    assert last is not None
    assert last.metrics is not None
    metrics = last.metrics
    bonus = sum(len(m.token_ids) - m.num_accepted for m in pipeline.recorder.committed)
    assert metrics.num_accepted_tokens + bonus == len(expected)
    assert metrics.num_accepted_tokens == sum(m.num_accepted for m in pipeline.recorder.committed)
    assert metrics.num_rounds == len(pipeline.recorder.committed)
    assert metrics.acceptance_length == len(expected) / metrics.num_rounds
    assert (metrics.cache_hits or 0) + (metrics.cache_misses or 0) == metrics.num_rounds - 1
    if max_tokens == 1:
        assert metrics.acceptance_rate is None
        assert metrics.decode_seconds is None
        assert metrics.hit_rate is None


def test_an_oracle_is_always_accepted_and_an_anti_draft_never() -> None:
    target = tiny_target()
    for name, wanted in (("oracle", 1.0), ("anti", 0.0)):
        for depth in (1, 4):
            pipeline = TinyPipeline(make_config(depth=depth), target, draft_by_name(name, target))
            # At temperature 1e-3 and an equal draft, the rejection rule would meet an all-zero residual.
            pipeline.generate(PROMPT, Sampling(max_tokens=24, temperature=1e-3, seed=3))
            last = pipeline.recorder.end("r")
            assert last is not None
            assert last.metrics is not None
            assert last.metrics.acceptance_rate == wanted, (name, depth)


def test_an_oracle_that_is_never_late_hits_every_round_between() -> None:
    target = tiny_target()
    pipeline = TinyPipeline(_ssd(depth=3, budget=12), target, draft_by_name("oracle", target))
    pipeline.generate(PROMPT, Sampling(max_tokens=41, temperature=1.0, seed=11))
    sources = [m.source for m in pipeline.recorder.committed if m.round_id > 0]
    # In one thread the prefill and its outcome come in one slice, before the draft can prepare; and in
    # the last round no further token could be proposed, so nothing was worth preparing.
    assert sources[1:-1] == [ProposalSource.HIT] * (len(sources) - 2)


@pytest.mark.parametrize("prepare", [False, True])
def test_an_oracle_in_a_tree_is_accepted_down_to_a_leaf(prepare: bool) -> None:
    """So the draft reads every node with its own ancestors, and finds their KV where an outcome moved it."""
    target = tiny_target()
    config = _ssd(budget=12, page_size=4) if prepare else make_config(page_size=4)
    config.speculation.tree = TreeConfig(widths=[2, 2, 2])
    pipeline = TinyPipeline(config, target, draft_by_name("oracle", target, page_size=4))
    pipeline.generate(PROMPT, Sampling(max_tokens=41, temperature=1.0, seed=11))
    blocks = [block for block in pipeline.recorder.committed if block.round_id > 0]
    assert [block.num_accepted for block in blocks[:-1]] == [3] * (len(blocks) - 1)
    assert not prepare or sum(block.source is ProposalSource.HIT for block in blocks) > len(blocks) / 2


@pytest.mark.parametrize("order_seed", range(12))
def test_results_do_not_depend_on_timing(order_seed: int) -> None:
    """Outcomes interrupt branch drafting at every step; what is ready is served."""
    target = tiny_target()
    sampling = Sampling(max_tokens=40, temperature=0.8, top_p=0.95, seed=5)
    expected = PlainDecoder(target).generate(PROMPT, sampling)
    source = draft_by_name("noisy", target, page_size=4)
    pipeline = TinyPipeline(_ssd(depth=5, page_size=4), target, source, order_seed=order_seed)
    assert pipeline.generate(PROMPT, sampling) == expected


@pytest.mark.parametrize("order_seed", [None, 1, 2])
@pytest.mark.parametrize("system", ["autoregressive", "speculative", "ssd"])
def test_batch_mates_and_refills_do_not_change_a_request(system: str, order_seed: int | None) -> None:
    """Five requests of different sampling through three slots, against each one alone."""
    target = tiny_target()
    plain = PlainDecoder(target)
    samplings = {
        request_id: Sampling(max_tokens=10 + 7 * i, temperature=0.4 * i, seed=100 + i)
        for i, request_id in enumerate(PROMPTS)
    }
    config = make_config(
        draft=system != "autoregressive", prepare_outcomes=system == "ssd", max_requests=3, page_size=4
    )
    source = None if system == "autoregressive" else draft_by_name("noisy", target, page_size=4)
    pipeline = TinyPipeline(config, target, source, order_seed=order_seed)
    for request_id, prompt in PROMPTS.items():
        pipeline.submit(request_id, prompt, samplings[request_id])
    pipeline.finish(*PROMPTS)
    for request_id, prompt in PROMPTS.items():
        assert pipeline.recorder.tokens(request_id) == plain.generate(prompt, samplings[request_id])
    _assert_nothing_is_held(pipeline)


def _assert_nothing_is_held(pipeline: TinyPipeline) -> None:
    verifier = pipeline.runtime.stages[StageName.VERIFIER]
    assert isinstance(verifier, TargetVerifier)
    verifier._runner.kv.check_integrity()
    speculator = pipeline.runtime.stages.get(StageName.SPECULATOR)
    if isinstance(speculator, DraftSpeculator):
        assert speculator._requests == {}
        if isinstance(speculator._source, ModelDraft):
            speculator._source._runner.kv.check_integrity()


@pytest.mark.parametrize("max_context", [40, 41, 43])
@pytest.mark.parametrize("system", ["autoregressive", "speculative", "ssd"])
def test_the_context_limit_ends_a_request_as_length(system: str, max_context: int) -> None:
    target = tiny_target(max_position=max_context)
    plain = PlainDecoder(target)
    config = make_config(
        draft=system != "autoregressive", prepare_outcomes=system == "ssd", max_context=max_context
    )
    source = None if system == "autoregressive" else draft_by_name("oracle", target)
    pipeline = TinyPipeline(config, target, source)
    for num_prompt in (max_context - 1, max_context - 2, max_context - 9):
        request_id, prompt = str(num_prompt), [(7 * i) % 100 + 20 for i in range(num_prompt)]
        pipeline.submit(request_id, prompt, _greedy(100))
        pipeline.finish(request_id)
        tokens = pipeline.recorder.tokens(request_id)
        assert tokens == plain.generate(prompt, _greedy(100), max_context=max_context)
        last = pipeline.recorder.end(request_id)
        assert last is not None
        assert last.finish_reason is (FinishReason.STOP if tokens[-1] == 5 else FinishReason.LENGTH)
    for num_prompt in (max_context, max_context + 1, 0):
        pipeline.submit("bad", [30] * num_prompt, _greedy())
        pipeline.runtime.run_until_idle()
        failure = pipeline.runtime.outputs[-1]
        assert isinstance(failure, RequestFailed)
        assert "prompt" in failure.reason
    _assert_nothing_is_held(pipeline)


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("num_prompt", [10, 28, 31, 32, 40])
def test_a_draft_with_a_shorter_context_drops_out(num_prompt: int, prepare: bool) -> None:
    target = tiny_target()
    draft = random_model(tiny_shape(max_position=32), seed=1, dtype=torch.float64)
    source = ModelDraft(tiny_runner(draft), vocab_size=128)
    prompt = [(11 * i) % 100 + 20 for i in range(num_prompt)]
    pipeline = TinyPipeline(make_config(prepare_outcomes=prepare), target, source)
    assert pipeline.generate(prompt, _greedy(30)) == PlainDecoder(target).generate(prompt, _greedy(30))


def test_a_draft_with_padded_rows_never_proposes_them() -> None:
    target = tiny_target()
    padded = random_model(tiny_shape(vocab_size=160), seed=9, dtype=torch.float64)
    pipeline = TinyPipeline(make_config(), target, ModelDraft(tiny_runner(padded), vocab_size=128))
    assert pipeline.generate(PROMPT, _greedy()) == PlainDecoder(target).generate(PROMPT, _greedy())


def test_a_draft_that_is_never_accepted_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target()
    target = replace(target, shape=replace(target.shape, eos_token_ids=()))
    config = make_config()
    config.speculation.draft.path = "some/draft"
    pipeline = TinyPipeline(config, target, draft_by_name("anti", target))
    with caplog.at_level(logging.WARNING):
        pipeline.generate(PROMPT, Sampling(max_tokens=100, seed=0))
    warnings = [r.getMessage() for r in caplog.records if "fits badly" in r.getMessage()]
    assert len(warnings) == 1
    assert "some/draft" in warnings[0]


@pytest.mark.parametrize("num_steps", range(0, 60, 3))
def test_a_cancelled_request_frees_everything_at_any_moment(num_steps: int) -> None:
    target = tiny_target()
    pipeline = TinyPipeline(
        _ssd(max_requests=2), target, draft_by_name("noisy", target), order_seed=num_steps
    )
    pipeline.submit("gone", PROMPTS["c"], _greedy(60))
    pipeline.submit("stays", PROMPT, _greedy(20))
    for _ in range(num_steps):
        pipeline.runtime._step()
    pipeline.runtime.send(StageName.VERIFIER, CancelRequest(request_id="gone"))
    pipeline.finish("stays")
    assert pipeline.recorder.tokens("stays") == PlainDecoder(target).generate(PROMPT, _greedy(20))
    last = pipeline.recorder.end("gone")
    if last is not None:
        assert last.finish_reason is FinishReason.CANCELLED
    else:
        assert any(isinstance(m, RequestFailed) and m.request_id == "gone" for m in pipeline.runtime.outputs)
    _assert_nothing_is_held(pipeline)


def test_a_stale_plan_is_ignored_after_the_outcome() -> None:
    target = tiny_target()
    pipeline = TinyPipeline(_ssd(), target, draft_by_name("noisy", target))
    pipeline.runtime.hold = lambda sender, receiver, message: (
        isinstance(message, Plan) and message.round_id == 1
    )
    pipeline.submit("r", PROMPT, _greedy())
    pipeline.runtime.run_until(lambda: sum(len(m.token_ids) for m in pipeline.recorder.committed) > 12)
    pipeline.runtime.hold = None
    pipeline.finish("r")
    speculator = pipeline.runtime.stages[StageName.SPECULATOR]
    assert isinstance(speculator, DraftSpeculator)
    assert speculator.num_late_messages >= 1
    assert pipeline.recorder.tokens("r") == PlainDecoder(target).generate(PROMPT, _greedy())


def _proposal(round_id: int, committed_len: int) -> Proposal:
    return Proposal(
        request_id="r#1",
        round_id=round_id,
        committed_len=committed_len,
        token_ids=[1],
        parents=[-1],
        source=ProposalSource.DRAFT,
        ready_length=0,
        draft_spans=[],
    )


def _outcome(round_id: int, committed_len: int, accepted_node: int = -1) -> Outcome:
    return Outcome(
        request_id="r#1",
        round_id=round_id,
        committed_len=committed_len,
        accepted_node=accepted_node,
        bonus_token=1,
        num_accepted=0,
        num_proposed=4,
    )


def test_repeated_round_messages_are_dropped_and_change_nothing() -> None:
    target = tiny_target()
    pipeline = TinyPipeline(make_config(), target, draft_by_name("noisy", target))
    pipeline.submit("r", PROMPT, _greedy())
    pipeline.runtime.run_until(lambda: len(pipeline.recorder.committed) == 3)
    pipeline.runtime.send(StageName.VERIFIER, _proposal(1, 8))
    pipeline.runtime.send(StageName.SPECULATOR, _outcome(0, 8))
    pipeline.runtime.run_until(lambda: pipeline.recorder.end("r") is not None)
    assert [name for name, _ in pipeline.runtime.protocol_errors] == [StageName.VERIFIER]
    assert pipeline.runtime.stages[StageName.SPECULATOR].num_late_messages == 1
    assert pipeline.recorder.tokens("r") == PlainDecoder(target).generate(PROMPT, _greedy())


@pytest.mark.parametrize(
    ("receiver", "message"),
    [
        (StageName.VERIFIER, _proposal(9, 99)),
        (StageName.SPECULATOR, _outcome(9, 99)),
        (StageName.SPECULATOR, _outcome(1, 99)),
        (StageName.SPECULATOR, _outcome(1, 9, accepted_node=30)),
    ],
)
def test_a_disagreement_about_what_is_committed_ends_the_run_instead_of_hanging(
    receiver: StageName, message: Proposal | Outcome
) -> None:
    target = tiny_target()
    pipeline = TinyPipeline(make_config(), target, draft_by_name("noisy", target))
    # Round 1 is proposed and not yet verified.
    pipeline.runtime.hold = lambda sender, receiver, message: (
        isinstance(message, Proposal) and sender is StageName.SPECULATOR
    )
    pipeline.submit("r", PROMPT, _greedy())
    pipeline.runtime.run_until_idle()
    pipeline.runtime.send(receiver, message)
    with pytest.raises(EngineDead, match=r"expected|were proposed"):
        pipeline.runtime.run_until_idle()


@pytest.mark.parametrize("prepare", [False, True])
def test_a_request_id_used_again_after_a_cancel_is_a_new_request(prepare: bool) -> None:
    """The old proposal is still under way when the successor with the same id and prompt is admitted."""
    target = tiny_target()
    pipeline = TinyPipeline(make_config(prepare_outcomes=prepare), target, draft_by_name("noisy", target))
    pipeline.submit("r", PROMPT, _greedy())
    pipeline.runtime.hold = lambda sender, receiver, message: (
        isinstance(message, Proposal | Plan) and sender is not StageName.FRONTEND
    )
    pipeline.runtime.run_until_idle()
    pipeline.runtime.send(StageName.VERIFIER, CancelRequest(request_id="r"))
    pipeline.submit("r", PROMPT, _greedy())
    pipeline.runtime.run_until_idle()
    pipeline.runtime.hold = None
    pipeline.runtime.run_until(
        lambda: sum(m.finish_reason is not None for m in pipeline.recorder.committed) == 2
    )
    pipeline.runtime.run_until_idle()
    assert pipeline.runtime.protocol_errors == []
    assert pipeline.runtime.stages[StageName.VERIFIER].num_late_messages == 1
    first_block = next(m for m in pipeline.recorder.committed if m.finish_reason is FinishReason.CANCELLED)
    later = pipeline.recorder.committed[pipeline.recorder.committed.index(first_block) + 1 :]
    tokens = [token for m in later for token in m.token_ids]
    assert tokens == PlainDecoder(target).generate(PROMPT, _greedy())
    _assert_nothing_is_held(pipeline)


@pytest.mark.parametrize(("nodes", "token_ids"), [([4], [1]), ([-2], [1]), ([0, 1], [1])])
def test_a_plan_for_nodes_that_were_not_proposed_is_refused(nodes: list[int], token_ids: list[int]) -> None:
    """Nothing is prepared then, and the tokens stay right."""
    target = tiny_target()
    pipeline = TinyPipeline(_ssd(), target, draft_by_name("noisy", target))
    pipeline.runtime.hold = lambda sender, receiver, message: (
        isinstance(message, Plan) and sender is StageName.PREDICTOR
    )
    pipeline.submit("r", PROMPT, _greedy())
    speculator = pipeline.runtime.stages[StageName.SPECULATOR]
    assert isinstance(speculator, DraftSpeculator)
    requests = speculator._requests
    pipeline.runtime.run_until(
        lambda: (
            "r#1" in requests and requests["r#1"].round_id == 2 and requests["r#1"].phase is Phase.PLANNING
        )
    )
    plan = Plan(
        request_id="r#1", round_id=2, nodes=nodes, token_ids=token_ids, log_probs=[0.0] * len(token_ids)
    )
    pipeline.runtime.send(StageName.SPECULATOR, plan)
    pipeline.runtime.run_until(lambda: pipeline.recorder.end("r") is not None)
    assert [name for name, _ in pipeline.runtime.protocol_errors] == [StageName.SPECULATOR]
    assert pipeline.recorder.tokens("r") == PlainDecoder(target).generate(PROMPT, _greedy())


def test_a_malformed_tree_is_refused_and_the_target_goes_on_without_it() -> None:
    target = tiny_target()
    source = draft_by_name("noisy", target)
    pipeline = TinyPipeline(make_config(), target, source)
    speculator_proposes = pipeline.runtime
    pipeline.runtime.hold = lambda sender, receiver, message: isinstance(message, Proposal)
    pipeline.submit("r", PROMPT, _greedy(6))
    speculator_proposes.run_until_idle()
    bad = Proposal(
        request_id="r#1", round_id=1, committed_len=8, token_ids=[1, 2], parents=[-1, 1],
        source=ProposalSource.DRAFT, ready_length=2, draft_spans=[],
    )  # fmt: skip
    speculator_proposes.send(StageName.VERIFIER, bad)
    pipeline.runtime.hold = lambda sender, receiver, message: (
        isinstance(message, Proposal) and sender is StageName.SPECULATOR and message.round_id == 1
    )
    verifier = pipeline.runtime.stages[StageName.VERIFIER]
    assert isinstance(verifier, TargetVerifier)
    pipeline.runtime.run_until(lambda: verifier._sequences["r"].round_id == 2)
    (name, error), *_ = pipeline.runtime.protocol_errors
    assert name is StageName.VERIFIER
    assert "parents come before" in str(error)


def test_rows_that_hit_keep_their_proposal_when_a_batch_mate_misses() -> None:
    target = tiny_target()
    config = _ssd(max_requests=2, depth=3, budget=12)
    plain, greedy = PlainDecoder(target), _greedy()

    def script(path: list[int]) -> list[int]:
        """An oracle for the first request, always wrong for the second."""
        ranked = plain.law(path, greedy)[0].argsort(descending=True).tolist()
        return ranked[-1:] if path[: len(PROMPTS["b"])] == PROMPTS["b"] else ranked[:6]

    pipeline = TinyPipeline(config, target, ScriptedDraft(script))
    for request_id in ("a", "b"):
        pipeline.submit(request_id, PROMPTS[request_id], _greedy(30))
    pipeline.runtime.run_until(lambda: all(pipeline.recorder.end(i) is not None for i in ("a", "b")))
    sources = {
        request_id: [m.source for m in pipeline.recorder.committed if m.request_id == request_id][2:-1]
        for request_id in ("a", "b")
    }
    assert set(sources["b"]) == {ProposalSource.BACKUP}
    assert set(sources["a"]) == {ProposalSource.HIT}


def test_hundreds_of_requests_leave_nothing_behind() -> None:
    """Short ones through three slots, every fifth cancelled: all tables are empty again at the end."""
    target = tiny_target()
    pipeline = TinyPipeline(
        _ssd(max_requests=3, page_size=4), target, draft_by_name("noisy", target), order_seed=4
    )
    names = [f"r{i}" for i in range(300)]
    for i, name in enumerate(names):
        pipeline.submit(
            name, PROMPTS["abcde"[i % 5]], Sampling(max_tokens=1 + i % 7, temperature=0.5, seed=i)
        )
        if i % 5 == 4:
            pipeline.runtime.send(StageName.VERIFIER, CancelRequest(request_id=name))
    pipeline.runtime.run_until_idle(max_steps=1_000_000)
    assert pipeline.runtime.protocol_errors == []
    failed = {m.request_id for m in pipeline.runtime.outputs if isinstance(m, RequestFailed)}
    assert all((pipeline.recorder.end(name) is None) == (name in failed) for name in names)
    _assert_nothing_is_held(pipeline)
    verifier, predictor = (pipeline.runtime.stages[n] for n in (StageName.VERIFIER, StageName.PREDICTOR))
    assert isinstance(verifier, TargetVerifier)
    assert isinstance(predictor, OutcomePredictor)
    assert (verifier._sequences, verifier._by_draft_id, predictor._statistics) == ({}, {}, {})


def test_a_token_that_the_model_has_no_row_for_fails_its_request_alone() -> None:
    target = tiny_target()
    pipeline = TinyPipeline(make_config(draft=False), target)
    pipeline.submit("bad", [*PROMPT, 128], _greedy(6))
    pipeline.submit("good", PROMPT, _greedy(6))
    pipeline.finish("good")
    (failure,) = pipeline.runtime.outputs
    assert isinstance(failure, RequestFailed)
    assert "token id 128" in failure.reason
    assert pipeline.recorder.tokens("good") == PlainDecoder(target).generate(PROMPT, _greedy(6))


def test_the_same_request_id_twice_is_refused() -> None:
    target = tiny_target()
    pipeline = TinyPipeline(make_config(draft=False), target)
    pipeline.submit("r", PROMPT, _greedy(6))
    pipeline.submit("r", PROMPT, _greedy(6))
    pipeline.finish("r")
    (failure,) = pipeline.runtime.outputs
    assert isinstance(failure, RequestFailed)
    assert "in use" in failure.reason


class _Sleepy(Planner):
    """Rests for three rounds after every other one."""

    asked = 0

    def rest_rounds(self) -> int:
        self.asked += 1
        return 3 if self.asked % 2 else 0


@pytest.mark.parametrize("order_seed", [None, 1, 2])
@pytest.mark.parametrize("prepare_outcomes", [False, True])
def test_a_resting_speculation_changes_no_token_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, prepare_outcomes: bool, order_seed: int | None
) -> None:
    monkeypatch.setattr("stages.draft_speculator.stage.Planner", _Sleepy)
    target = tiny_target()
    config = make_config(prepare_outcomes=prepare_outcomes)
    pipeline = TinyPipeline(config, target, draft_by_name("oracle", target), order_seed=order_seed)
    assert pipeline.generate(PROMPT, _greedy(60)) == PlainDecoder(target).generate(PROMPT, _greedy(60))
    end = pipeline.recorder.end("r")
    assert end is not None
    assert end.metrics is not None
    plain = [m for m in pipeline.recorder.committed if m.source is None]
    assert end.metrics.num_rest_rounds == len(plain) - 1, "the prefill has no proposal either"
    assert end.metrics.num_rest_rounds >= 6
    assert end.metrics.num_accepted_tokens > 0, "it speculates in between"
    _assert_nothing_is_held(pipeline)
