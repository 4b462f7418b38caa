"""Requests that give their KV up for others, at any moment, return the tokens that they return alone."""

from __future__ import annotations

import pytest
import torch

from conf.schema import RunConfig, Verification
from pipeline.messages import (
    CancelRequest,
    FinishReason,
    RequestFailed,
    Sampling,
    StageName,
    StructuredOutputs,
)
from stages.draft_speculator.draft_source import DraftSource, Drawing
from stages.draft_speculator.model_draft import ModelDraft
from stages.draft_speculator.ngram_draft import NgramDraft
from stages.draft_speculator.stage import DraftSpeculator
from stages.model.weights import LoadedModel
from stages.outcome_predictor.stage import OutcomePredictor
from stages.target_verifier.stage import TargetVerifier
from tests.tiny import (
    SYSTEMS,
    PlainDecoder,
    TinyPipeline,
    mixed_model,
    system_config,
    tiny_runner,
    tiny_target,
)
from tests.tiny_grammar import compiler

PROMPTS = {
    "a": [17, 3, 99, 42, 8, 17, 3],
    "b": [5, 6, 7],
    "c": list(range(40, 60)),
    "d": [120],
    "e": [9, 9, 9, 9],
}
SAMPLINGS = {
    request_id: Sampling(max_tokens=16 + 5 * i, temperature=0.5 * (i % 3), seed=100 + i)
    for i, request_id in enumerate(PROMPTS)
}
MAX_CONTEXT = 64
PAGE_SIZE = 4
SLOT_KIB = 1
"""Of the tiny model in float64."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    plain = PlainDecoder(tiny_target())
    return {name: plain.generate(PROMPTS[name], SAMPLINGS[name], max_context=MAX_CONTEXT) for name in PROMPTS}


def _config(system: str, *, spare_pages: int | None) -> RunConfig:
    """spare_pages: of the target beyond one request of full length; None: as many as all need."""
    config = system_config(system, page_size=PAGE_SIZE, max_requests=4)
    config.model.max_context = MAX_CONTEXT
    if spare_pages is not None:
        num_slots = MAX_CONTEXT + 12 + spare_pages * PAGE_SIZE
        config.placement.kv_memory = f"{num_slots * SLOT_KIB}KiB"
    return config


def _draft(target: LoadedModel, *, num_slots: int = 4096, drawing: Drawing = Drawing.COUPLED) -> ModelDraft:
    runner = tiny_runner(mixed_model(target, share=0.25), page_size=PAGE_SIZE, num_slots=num_slots)
    runner.kv.keeps_prefixes = True
    return ModelDraft(runner, vocab_size=target.shape.vocab_size, drawing=drawing)


def _pipeline(config: RunConfig, source: DraftSource | None, **kwargs: int | None) -> TinyPipeline:
    return TinyPipeline(config, tiny_target(), source, **kwargs)  # type: ignore[arg-type]


def _source(system: str, **kwargs: int) -> ModelDraft | None:
    return None if system == "autoregressive" else _draft(tiny_target(), **kwargs)


def _verifier(pipeline: TinyPipeline) -> TargetVerifier:
    verifier = pipeline.runtime.stages[StageName.VERIFIER]
    assert isinstance(verifier, TargetVerifier)
    return verifier


def assert_nothing_is_held(pipeline: TinyPipeline) -> None:
    verifier = _verifier(pipeline)
    verifier._runner.kv.check_integrity()
    ledger = verifier._ledger
    assert (verifier._sequences, verifier._by_draft_id, ledger._draft_pages) == ({}, {}, {})
    assert verifier._admission.preempted == []
    if ledger._draft is not None:
        assert ledger._num_draft_free == ledger._draft.num_pages
    speculator = pipeline.runtime.stages.get(StageName.SPECULATOR)
    if isinstance(speculator, DraftSpeculator):
        assert speculator._requests == {}
        if isinstance(speculator._source, ModelDraft):
            speculator._source._runner.kv.check_integrity()
            assert speculator._source._requests == {}
    predictor = pipeline.runtime.stages.get(StageName.PREDICTOR)
    if isinstance(predictor, OutcomePredictor):
        assert predictor._statistics == {}


def _run_until_tokens(pipeline: TinyPipeline, count: int) -> None:
    active = _verifier(pipeline)._sequences
    pipeline.runtime.run_until(lambda: len(pipeline.recorder.tokens("r")) >= count and "r" in active)


def _num_preemptions(pipeline: TinyPipeline) -> int:
    return sum(m.metrics.num_preemptions for m in pipeline.recorder.committed if m.metrics is not None)


@pytest.mark.parametrize("order_seed", [None, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("system", SYSTEMS)
def test_too_few_pages_of_the_target_change_no_token(
    expected: dict[str, list[int]], system: str, prefix_cache: bool, order_seed: int | None
) -> None:
    config = _config(system, spare_pages=3)
    config.placement.prefix_cache = prefix_cache
    pipeline = _pipeline(config, _source(system), order_seed=order_seed)
    for request_id, prompt in PROMPTS.items():
        pipeline.submit(request_id, prompt, SAMPLINGS[request_id])
    pipeline.finish(*PROMPTS)
    assert {name: pipeline.recorder.tokens(name) for name in PROMPTS} == expected
    assert _num_preemptions(pipeline) > 0
    oldest = pipeline.recorder.end("a")
    assert oldest is not None
    assert oldest.metrics is not None
    assert oldest.metrics.num_preemptions == 0, "the youngest gives way"
    assert_nothing_is_held(pipeline)


@pytest.mark.parametrize("order_seed", [None, 1])
@pytest.mark.parametrize("system", SYSTEMS[1:])
def test_too_few_pages_of_the_draft_change_no_token(
    expected: dict[str, list[int]], system: str, order_seed: int | None
) -> None:
    config = _config(system, spare_pages=None)
    nodes = {"speculative": 9, "tree": 35, "ssd": 39, "saguaro": 39, "saguaro_tree": 95}[system]
    source = _draft(tiny_target(), num_slots=MAX_CONTEXT + nodes + max(nodes - 16, 0))
    pipeline = _pipeline(config, source, order_seed=order_seed)
    for request_id, prompt in PROMPTS.items():
        pipeline.submit(request_id, prompt, SAMPLINGS[request_id])
    pipeline.finish(*PROMPTS)
    assert {name: pipeline.recorder.tokens(name) for name in PROMPTS} == expected
    assert _num_preemptions(pipeline) > 0
    assert_nothing_is_held(pipeline)


@pytest.mark.parametrize("num_steps", range(2, 80, 6))
@pytest.mark.parametrize("system", ["autoregressive", "speculative", "saguaro", "saguaro_tree"])
def test_a_pre_emption_at_any_moment_changes_no_token(
    expected: dict[str, list[int]], system: str, num_steps: int
) -> None:
    """Proposals, candidates and plans of the request are under way when it happens."""
    pipeline = _pipeline(_config(system, spare_pages=None), _source(system), order_seed=num_steps)
    for request_id in ("a", "c"):
        pipeline.submit(request_id, PROMPTS[request_id], SAMPLINGS[request_id])
    for _ in range(num_steps):
        pipeline.runtime._step()
    verifier = _verifier(pipeline)
    victims = list(verifier._sequences.values())[-1:]
    for victim in victims:
        verifier._preempt(victim)
    pipeline.finish("a", "c")
    assert {name: pipeline.recorder.tokens(name) for name in ("a", "c")} == {
        name: expected[name] for name in ("a", "c")
    }
    assert _num_preemptions(pipeline) == len(victims)
    assert_nothing_is_held(pipeline)


@pytest.mark.parametrize("prefill_chunk", [1, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("system", ["autoregressive", "speculative", "saguaro_tree"])
def test_texts_that_are_read_again_in_chunks_change_no_token(
    expected: dict[str, list[int]], system: str, prefix_cache: bool, prefill_chunk: int
) -> None:
    """Some are pre-empted once more, or for the first time, in the middle of it."""
    config = _config(system, spare_pages=3)
    config.placement.prefix_cache, config.placement.prefill_chunk = prefix_cache, prefill_chunk
    pipeline = _pipeline(config, _source(system), order_seed=prefill_chunk)
    for request_id, prompt in PROMPTS.items():
        pipeline.submit(request_id, prompt, SAMPLINGS[request_id])
    verifier = _verifier(pipeline)
    for count in (1, 3, 5, 7):
        pipeline.runtime.run_until(
            lambda count=count: any(  # type: ignore[misc]
                s.is_prefilling and s.num_prefilled >= count for s in verifier._sequences.values()
            )
        )
        youngest = max(verifier._sequences.values(), key=lambda s: s.arrival)
        assert youngest.is_prefilling
        verifier._preempt(youngest)
    pipeline.finish(*PROMPTS)
    for name in PROMPTS:
        assert pipeline.recorder.tokens(name) == expected[name]
        blocks = [m for m in pipeline.recorder.committed if m.request_id == name]
        assert [m.round_id for m in blocks] == list(range(len(blocks)))
        assert blocks[-1].metrics is not None
        assert blocks[-1].metrics.num_rounds == len(blocks)
    assert _num_preemptions(pipeline) >= 4
    assert_nothing_is_held(pipeline)


@pytest.mark.parametrize("order_seed", range(4))
@pytest.mark.parametrize("system", ["autoregressive", "speculative", "saguaro_tree"])
def test_cancels_beside_pre_emptions_leave_the_others_right(
    expected: dict[str, list[int]], system: str, order_seed: int
) -> None:
    """Of waiting, of active and of pre-empted requests."""
    pipeline = _pipeline(_config(system, spare_pages=2), _source(system), order_seed=order_seed)
    for request_id, prompt in PROMPTS.items():
        pipeline.submit(request_id, prompt, SAMPLINGS[request_id])
    verifier = _verifier(pipeline)
    pipeline.runtime.run_until(lambda: bool(verifier._admission.preempted))
    gone = {verifier._admission.preempted[0], ["b", "e"][order_seed % 2]}
    for request_id in gone:
        pipeline.runtime.send(StageName.VERIFIER, CancelRequest(request_id=request_id))
    stay = [name for name in PROMPTS if name not in gone]
    pipeline.finish(*stay)
    for name in stay:
        assert pipeline.recorder.tokens(name) == expected[name]
    for name in gone:
        tokens, end = pipeline.recorder.tokens(name), pipeline.recorder.end(name)
        assert tokens == expected[name][: len(tokens)]
        if end is None:
            assert any(
                isinstance(m, RequestFailed) and m.request_id == name for m in pipeline.runtime.outputs
            )
        else:
            assert end.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP)
    assert_nothing_is_held(pipeline)


def test_who_waited_behind_a_request_that_is_cancelled_waits_no_longer() -> None:
    config = _config("autoregressive", spare_pages=None)
    config.placement.kv_memory = f"{MAX_CONTEXT * SLOT_KIB}KiB"
    pipeline = _pipeline(config, None)
    pipeline.submit("runs", PROMPTS["a"], Sampling(max_tokens=40, seed=1, ignore_eos=True))
    pipeline.submit("big", list(range(40, 100)), Sampling(max_tokens=4, seed=1))
    pipeline.submit("small", PROMPTS["b"], Sampling(max_tokens=4, seed=1))
    pipeline.runtime.run_until(lambda: len(pipeline.recorder.tokens("runs")) > 3)
    assert pipeline.recorder.tokens("small") == [], "nobody overtakes"
    pipeline.runtime.send(StageName.VERIFIER, CancelRequest(request_id="big"))
    pipeline.runtime.run_until(lambda: pipeline.recorder.end("small") is not None)
    assert pipeline.recorder.end("runs") is None
    pipeline.finish("runs")
    assert_nothing_is_held(pipeline)


@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_a_grammar_goes_on_where_it_was(draft: str) -> None:
    sampling = Sampling(
        max_tokens=32, temperature=1, seed=11, structured_outputs=StructuredOutputs(regex="[a-z]{40}")
    )
    tokens = []
    for victims in (0, 3):
        target = tiny_target()
        if draft == "ngram":
            source: DraftSource = NgramDraft(grammars=compiler())
        else:
            source = ModelDraft(tiny_runner(target), vocab_size=target.shape.vocab_size, grammars=compiler())
        pipeline = TinyPipeline(_config("saguaro", spare_pages=None), target, source, grammars=compiler())
        pipeline.submit("r", PROMPTS["a"], sampling)
        for count in range(victims):
            _run_until_tokens(pipeline, 4 * (count + 1))
            _verifier(pipeline)._preempt(_verifier(pipeline)._sequences["r"])
        pipeline.finish("r")
        tokens.append(pipeline.recorder.tokens("r"))
        assert len(tokens[-1]) > 12
        assert _num_preemptions(pipeline) == victims
        assert_nothing_is_held(pipeline)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("system", ["autoregressive", "saguaro_tree"])
def test_penalties_and_limits_count_what_was_committed_before_a_pre_emption(system: str) -> None:
    sampling = Sampling(
        max_tokens=30,
        temperature=0.7,
        seed=4,
        presence_penalty=1.5,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        min_tokens=25,
        logprobs=2,
    )
    tokens = []
    for victims in (0, 3):
        pipeline = _pipeline(_config(system, spare_pages=None), _source(system))
        pipeline.submit("r", PROMPTS["a"], sampling)
        verifier = _verifier(pipeline)
        for count in range(victims):
            _run_until_tokens(pipeline, 6 * (count + 1))
            verifier._preempt(verifier._sequences["r"])
        pipeline.finish("r")
        tokens.append(pipeline.recorder.tokens("r"))
        logprobs = [entry for m in pipeline.recorder.committed for entry in m.logprobs or []]
        assert [entry.token_id for entry in logprobs] == tokens[-1]
        assert _num_preemptions(pipeline) == victims
        assert_nothing_is_held(pipeline)
    assert tokens[0] == tokens[1]


def test_rounds_are_counted_once_and_the_oldest_returns_first() -> None:
    pipeline = _pipeline(_config("saguaro", spare_pages=None), _source("saguaro"))
    for name in ("a", "b", "c"):
        pipeline.submit(name, PROMPTS[name], SAMPLINGS[name])
    verifier = _verifier(pipeline)
    pipeline.runtime.run_until(
        lambda: all(len(pipeline.recorder.tokens(name)) > 3 for name in ("a", "b", "c"))
    )
    for name in ("c", "b"):
        verifier._preempt(verifier._sequences[name])
    assert verifier._admission.preempted == ["b", "c"]
    pipeline.finish("a", "b", "c")
    for name in ("a", "b", "c"):
        blocks = [m for m in pipeline.recorder.committed if m.request_id == name]
        end = blocks[-1]
        assert end.metrics is not None
        assert [m.round_id for m in blocks] == list(range(len(blocks)))
        assert end.metrics.num_rounds == len(blocks)
        assert end.metrics.num_accepted_tokens == sum(m.num_accepted for m in blocks)


@pytest.mark.parametrize("order_seed", [None, 1])
def test_the_rejection_rule_goes_on_after_a_pre_emption(order_seed: int | None) -> None:
    """Its tokens depend on what was proposed; the law of what comes after is the target's as ever."""
    config = _config("saguaro", spare_pages=3)
    config.speculation.verification = Verification.rejection
    pipeline = _pipeline(config, _draft(tiny_target(), drawing=Drawing.DRAWN), order_seed=order_seed)
    for request_id, prompt in PROMPTS.items():
        pipeline.submit(request_id, prompt, SAMPLINGS[request_id])
    pipeline.finish(*PROMPTS)
    assert _num_preemptions(pipeline) > 0
    assert_nothing_is_held(pipeline)
