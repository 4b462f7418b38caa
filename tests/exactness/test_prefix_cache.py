"""What earlier requests computed is used again, by target and draft, and changes no token."""

from __future__ import annotations

import random

import pytest
import torch

from pipeline.messages import CancelRequest, RequestMetrics, Sampling, StageName
from stages.draft_speculator.draft_source import ExtendJob
from stages.draft_speculator.model_draft import ModelDraft
from stages.model.batch import ForwardBatch
from stages.target_verifier.stage import TargetVerifier
from tests.exactness.test_pre_emption import assert_nothing_is_held
from tests.tiny import (
    SYSTEMS,
    PlainDecoder,
    TinyPipeline,
    mixed_model,
    system_config,
    tiny_runner,
    tiny_target,
)

PAGE_SIZE = 4
FIRST = [17, 3, 99, 42, 8, 17, 3, 30, 31, 32, 33]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _pipeline(
    system: str,
    *,
    prefix_cache: bool = True,
    order_seed: int | None = None,
    kv_kib: int | None = None,
    prefill_chunk: int = 128,
) -> TinyPipeline:
    target = tiny_target()
    config = system_config(system, page_size=PAGE_SIZE, max_requests=3)
    config.placement.prefix_cache = prefix_cache
    config.placement.prefill_chunk = prefill_chunk
    if kv_kib is not None:
        config.model.max_context = 96
        config.placement.kv_memory = f"{kv_kib}KiB"
    source = None
    if system != "autoregressive":
        runner = tiny_runner(mixed_model(target, share=0.25), page_size=PAGE_SIZE)
        runner.kv.keeps_prefixes = prefix_cache
        source = ModelDraft(runner, vocab_size=target.shape.vocab_size)
    return TinyPipeline(config, target, source, order_seed=order_seed)


def _metrics(pipeline: TinyPipeline, request_id: str) -> RequestMetrics:
    end = pipeline.recorder.end(request_id)
    assert end is not None
    assert end.metrics is not None
    return end.metrics


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_next_turn_reads_only_what_is_new_in_target_and_draft(
    monkeypatch: pytest.MonkeyPatch, system: str, temperature: float
) -> None:
    plain = PlainDecoder(tiny_target())
    sampling = Sampling(max_tokens=21, temperature=temperature, seed=11, ignore_eos=True)
    outcomes = []
    for prefix_cache in (True, False):
        # Else the draft, which reads more without the cache, would not propose in the first round.
        monkeypatch.setattr("stages.draft_speculator.stage._MOST_BEHIND", 1000)
        pipeline = _pipeline(system, prefix_cache=prefix_cache)
        pipeline.submit("first", FIRST, sampling)
        pipeline.finish("first")
        answer = pipeline.recorder.tokens("first")
        prompt = [*FIRST, *answer, 60, 61, 62]
        read_by_target, read_by_draft = [], []
        verifier = pipeline.runtime.stages[StageName.VERIFIER]
        assert isinstance(verifier, TargetVerifier)
        forward, extend = verifier._runner.forward, ModelDraft.extend

        def count_forward(batch: ForwardBatch, forward=forward, counts=read_by_target) -> torch.Tensor:
            counts.append(len(batch.token_ids))
            return forward(batch)

        def count_extend(
            self: ModelDraft, jobs: list[ExtendJob], extend=extend, counts=read_by_draft
        ) -> None:
            counts += [len(job.nodes) for job in jobs]
            extend(self, jobs)

        monkeypatch.setattr(verifier._runner, "forward", count_forward)
        monkeypatch.setattr(ModelDraft, "extend", count_extend)
        pipeline.submit("second", prompt, sampling)
        pipeline.finish("second")
        monkeypatch.undo()
        # The answer's last token was never read; 31 tokens before it are 7 full pages of 4.
        num_cached = 28 if prefix_cache else 0
        metrics = _metrics(pipeline, "second")
        assert metrics.num_cached_prompt_tokens == num_cached
        assert read_by_target[0] == len(prompt) - num_cached
        if system != "autoregressive":
            # Of the first answer the draft may lack the last two blocks: it was not told how that ended.
            # The first token of the second may be there before it begins to read.
            fewest = len(prompt) - num_cached
            assert fewest <= read_by_draft[0] <= fewest + 1 + (3 * PAGE_SIZE if prefix_cache else 0)
        outcomes.append((pipeline.recorder.tokens("second"), metrics.num_rounds, metrics.acceptance_rate))
        assert_nothing_is_held(pipeline)
    assert outcomes[0] == outcomes[1], "tokens, rounds and acceptance are the same with and without"
    law = Sampling(max_tokens=21, temperature=temperature, seed=11)
    expected = plain.generate([*FIRST, *answer, 60, 61, 62], law)
    assert outcomes[0][0][: len(expected)] == expected


@pytest.mark.parametrize("order_seed", [None, 1])
@pytest.mark.parametrize("system", SYSTEMS)
def test_requests_with_one_beginning_share_it_and_stay_apart(system: str, order_seed: int | None) -> None:
    """At the same time and one after another; the same prompt too, whose last page is not shared."""
    plain = PlainDecoder(tiny_target())
    common = [(7 * i) % 100 + 20 for i in range(18)]
    prompts = {
        "a": [*common, 1],
        "b": [*common, 2, 3, 4, 7, 8],
        "c": common,
        "d": common,
        "e": common[:16],
        "f": [*common[:9], 99, *common[10:]],
    }
    pipeline = _pipeline(system, order_seed=order_seed, prefill_chunk=8)
    samplings = {name: Sampling(max_tokens=14, temperature=0.8, seed=i) for i, name in enumerate(prompts)}
    for name, prompt in prompts.items():
        pipeline.submit(name, prompt, samplings[name])
    pipeline.finish(*prompts)
    for name, prompt in prompts.items():
        assert pipeline.recorder.tokens(name) == plain.generate(prompt, samplings[name]), name
    assert _metrics(pipeline, "a").num_cached_prompt_tokens == 0
    cached = {name: _metrics(pipeline, name).num_cached_prompt_tokens for name in "bcdef"}
    assert cached == {"b": 16, "c": 16, "d": 16, "e": 12, "f": 8}
    assert_nothing_is_held(pipeline)


@pytest.mark.parametrize("prefill_chunk", [128, 64])
def test_prompts_that_come_together_and_do_not_fit_in_one_forward_are_read_once(prefill_chunk: int) -> None:
    pipeline = _pipeline("autoregressive", prefill_chunk=prefill_chunk)
    common = [(7 * i) % 100 + 20 for i in range(100)]
    names = [f"r{index}" for index in range(4)]
    for index, name in enumerate(names):
        pipeline.submit(name, [*common, index], Sampling(max_tokens=20, seed=index, ignore_eos=True))
    pipeline.finish(*names)
    cached = [_metrics(pipeline, name).num_cached_prompt_tokens for name in names]
    assert cached == [0, 100, 100, 100]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("system", ["autoregressive", "speculative", "saguaro", "saguaro_tree"])
def test_chats_with_cancels_in_a_small_cache_return_what_plain_decoding_does(system: str, seed: int) -> None:
    """Turns that share and evict one another's pages; requests are pre-empted and cancelled in between."""
    draw = random.Random(seed)
    target = tiny_target()
    plain = PlainDecoder(target)
    pipeline = _pipeline(system, order_seed=seed, kv_kib=140)
    histories = [[draw.randrange(20, 120) for _ in range(draw.randint(1, 9))] for _ in range(3)]
    num_cached = 0
    for turn in range(4):
        names = {f"{turn}.{chat}": chat for chat in range(3)}
        samplings = {
            name: Sampling(max_tokens=draw.randint(1, 13), temperature=draw.choice([0.0, 0.9]), seed=turn)
            for name in names
        }
        for name, chat in names.items():
            pipeline.submit(name, histories[chat], samplings[name])
        gone = f"gone {turn}"
        pipeline.submit(gone, histories[0], Sampling(max_tokens=40, seed=1))
        for _ in range(draw.randint(0, 60)):
            pipeline.runtime._step()
        pipeline.runtime.send(StageName.VERIFIER, CancelRequest(request_id=gone))
        pipeline.finish(*names)
        for name, chat in names.items():
            answer = pipeline.recorder.tokens(name)
            assert answer == plain.generate(histories[chat], samplings[name], max_context=96), name
            num_cached += _metrics(pipeline, name).num_cached_prompt_tokens
            histories[chat] = [*histories[chat], *answer, draw.randrange(20, 120)]
        assert_nothing_is_held(pipeline)
    assert num_cached > 0
