"""Every request option in every system returns what plain decoding returns; the law is transformers'."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from pipeline.messages import Committed, Sampling
from tests.plain_options import PlainAnswer, plain_answer
from tests.tiny import (
    EOS,
    SYSTEMS,
    VOCAB_SIZE,
    PlainDecoder,
    TinyPipeline,
    draft_by_name,
    system_config,
    tiny_target,
)

PROMPT = [17, 3, 99, 42, 8, 17, 3]
RAW = Sampling(max_tokens=1, seed=0)
"""Greedy without options: its law is the logits themselves."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def _plain() -> PlainDecoder:
    return PlainDecoder(tiny_target())


@cache
def _logits(tokens: tuple[int, ...]) -> torch.Tensor:
    return _plain().law(tokens, RAW)[0]


def _expected(sampling: Sampling) -> PlainAnswer:
    return plain_answer(lambda tokens: _logits(tuple(tokens)), PROMPT, sampling, eos=EOS)


def _answers(
    system: str,
    samplings: Mapping[str, Sampling],
    *,
    draft: str = "noisy",
    max_requests: int = 6,
    order_seed: int | None = None,
) -> tuple[dict[str, PlainAnswer], dict[str, list[Committed]]]:
    """All requests through one pipeline, some at a time: their answers and blocks by name."""
    target = tiny_target()
    source = None if system == "autoregressive" else draft_by_name(draft, target, page_size=4)
    pipeline = TinyPipeline(
        system_config(system, max_requests=max_requests), target, source, order_seed=order_seed
    )
    for name, sampling in samplings.items():
        pipeline.submit(name, PROMPT, sampling)
    pipeline.finish(*samplings)
    answers, blocks = {}, {}
    for name in samplings:
        end = pipeline.recorder.end(name)
        assert end is not None
        assert end.finish_reason is not None
        answers[name] = PlainAnswer(
            token_ids=pipeline.recorder.tokens(name),
            finish_reason=end.finish_reason.value,
            stop_reason=end.stop_reason,
        )
        blocks[name] = [message for message in pipeline.recorder.committed if message.request_id == name]
    return answers, blocks


OPTIONS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -1.0},
    "frequency": {"frequency_penalty": 0.8},
    "negative frequency": {"frequency_penalty": -1.8},
    "repetition": {"repetition_penalty": 1.6},
    "repetition below 1": {"repetition_penalty": 0.7},
    "bias": {"logit_bias": {17: 1.5, 3: -100.0, 64: 2.0}},
    "all penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
}


@pytest.fixture(scope="module")
def law_changing() -> dict[str, tuple[Sampling, PlainAnswer]]:
    """Each option alone, at two temperatures, with what plain decoding returns."""
    torch.set_num_threads(1)
    requests = {}
    for temperature in (0.0, 0.9):
        plain = Sampling(max_tokens=24, temperature=temperature, seed=21, ignore_eos=True)
        without = _expected(plain)
        for name, options in OPTIONS.items():
            if temperature == 0 and {"top_k", "top_p", "min_p"} & set(options):
                continue  # greedy choices ignore them
            sampling = _with(plain, **options)
            requests[f"{name} at {temperature}"] = sampling, _expected(sampling)
            assert requests[f"{name} at {temperature}"][1] != without, f"{name} tests nothing"
    return requests


@pytest.mark.parametrize("system", SYSTEMS)
def test_law_changing_options_alone(
    system: str, law_changing: dict[str, tuple[Sampling, PlainAnswer]]
) -> None:
    answers, _ = _answers(system, {name: sampling for name, (sampling, _) in law_changing.items()})
    assert answers == {name: expected for name, (_, expected) in law_changing.items()}


def _with(sampling: Sampling, **options: Any) -> Sampling:
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**{**fields, **options})


@pytest.mark.parametrize("temperature", [0.0, 1.6])
def test_end_of_sequence_stop_tokens_and_min_tokens(temperature: float) -> None:
    """Stop tokens end an answer where they come, unless they are banned; then others come in their place."""
    free = Sampling(max_tokens=20, temperature=temperature, seed=5, ignore_eos=True)
    free_tokens = _expected(free).token_ids
    stops = free_tokens[4:7]
    # The end-of-sequence token comes at once with this bias.
    eager = {EOS: 100.0}
    cases = {
        "stop tokens": _with(free, stop_token_ids=stops),
        "stop tokens from the first token on": _with(free, stop_token_ids=free_tokens[:1]),
        "min_tokens": _with(free, stop_token_ids=stops, min_tokens=11),
        "min_tokens is max_tokens": _with(free, stop_token_ids=stops, min_tokens=20),
        "eos": _with(free, ignore_eos=False, logit_bias=eager),
        "eos after min_tokens": _with(free, ignore_eos=False, logit_bias=eager, min_tokens=9),
        "eos ignored": _with(free, logit_bias=eager),
    }
    expected = {name: _expected(sampling) for name, sampling in cases.items()}
    assert len(expected["stop tokens"].token_ids) <= 5
    assert len(expected["min_tokens"].token_ids) > 11
    assert expected["eos"].token_ids == [EOS]
    assert len(expected["eos after min_tokens"].token_ids) == 10
    assert expected["eos ignored"].token_ids == [EOS] * 20
    for system in SYSTEMS:
        assert _answers(system, cases)[0] == expected, system


def _drawn(generator: random.Random) -> Sampling:
    """A request with some of all options."""

    def maybe(value: Any, neutral: Any) -> Any:
        return value if generator.random() < 0.5 else neutral

    ids = range(VOCAB_SIZE)
    max_tokens = generator.randint(1, 24)
    return Sampling(
        max_tokens=max_tokens,
        seed=generator.getrandbits(53),
        temperature=generator.choice([0.0, 0.4, 1.0, 1.7]),
        top_k=maybe(generator.randint(1, VOCAB_SIZE), 0),
        top_p=maybe(generator.uniform(0.3, 1), 1.0),
        min_p=maybe(generator.uniform(0, 0.2), 0.0),
        min_tokens=maybe(generator.randint(0, max_tokens), 0),
        stop_token_ids=maybe(generator.sample(ids, 6), []),
        ignore_eos=maybe(True, False),
        presence_penalty=maybe(generator.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(generator.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(generator.uniform(0.5, 2), 1.0),
        logit_bias=maybe({token: generator.uniform(-8, 3) for token in generator.sample(ids, 5)}, {}),
        logprobs=maybe(generator.randint(0, 5), None),
    )


@pytest.mark.parametrize("draft", ["noisy", "oracle", "scripted", "ngram"])
def test_options_combined_at_random(draft: str) -> None:
    samplings = {f"case {case}": _drawn(random.Random(case)) for case in range(10)}
    expected = {name: _expected(sampling) for name, sampling in samplings.items()}
    for system in SYSTEMS[1:] if draft != "noisy" else SYSTEMS:
        assert _answers(system, samplings, draft=draft)[0] == expected, system


@pytest.mark.parametrize("order_seed", [None, 5])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_batch_of_eight_returns_what_each_request_returns_alone(
    system: str, order_seed: int | None
) -> None:
    """Whatever its mates ask for, and whatever is a hit or a miss by the order of messages."""
    samplings = {f"case {case}": _drawn(random.Random(100 + case)) for case in range(8)}
    expected = {name: _expected(sampling) for name, sampling in samplings.items()}
    together, _ = _answers(system, samplings, max_requests=8, order_seed=order_seed)
    assert together == expected
    if order_seed is None:
        alone, _ = _answers(system, samplings, max_requests=1)
        assert alone == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("system", SYSTEMS)
def test_logprobs_are_those_of_a_full_forward(system: str, temperature: float) -> None:
    """Of the model's own law, whatever the law is that tokens are chosen from."""
    sampling = Sampling(
        max_tokens=24,
        temperature=temperature,
        seed=3,
        logprobs=4,
        ignore_eos=True,
        top_k=30,
        presence_penalty=1.0,
        logit_bias={7: 4.0},
    )
    answers, blocks = _answers(system, {"r": sampling})
    answer, committed = answers["r"], blocks["r"]
    entries = [entry for block in committed for entry in block.logprobs or []]
    assert [entry.token_id for entry in entries] == answer.token_ids
    for index, entry in enumerate(entries):
        law = _logits((*PROMPT, *answer.token_ids[:index])).log_softmax(-1)
        values, ids = law.topk(4)
        assert entry.top_token_ids == ids.tolist()
        assert entry.top_logprobs == pytest.approx(values.tolist(), abs=1e-9)
        assert entry.logprob == pytest.approx(float(law[entry.token_id]), abs=1e-9)
        assert entry.rank == int((law >= law[entry.token_id]).sum())


def test_requests_without_logprobs_carry_none() -> None:
    _, blocks = _answers("speculative", {"r": Sampling(max_tokens=8, seed=0)})
    assert {block.logprobs for block in blocks["r"]} == {None}


@pytest.mark.parametrize(
    "options", [{"presence_penalty": 2.0}, {"repetition_penalty": 1.8}, {"logit_bias": {9: 6.0}}]
)
@pytest.mark.parametrize("system", ["speculative", "saguaro"])
def test_a_draft_that_is_the_target_is_accepted_under_every_law(system: str, options: dict[str, Any]) -> None:
    """It applies the options as the target does, along the path that it proposes."""
    sampling = Sampling(max_tokens=32, temperature=1.0, seed=4, ignore_eos=True, **options)
    _, blocks = _answers(system, {"r": sampling}, draft="oracle")
    metrics = blocks["r"][-1].metrics
    assert metrics is not None
    assert metrics.acceptance_rate == 1.0
