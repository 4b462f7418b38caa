"""Structured outputs in every system: the tokens of plain decoding under a mask of its own; valid texts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from conf.schema import RunConfig, TreeConfig, Verification
from pipeline.inprocess import Hold
from pipeline.messages import (
    Committed,
    Message,
    Outcome,
    RequestFailed,
    Sampling,
    StageName,
    StructuredOutputs,
)
from pipeline.samples import sample_seed
from stages.draft_speculator.draft_source import DraftSource, Drawing
from stages.draft_speculator.model_draft import ModelDraft
from stages.target_verifier.checks import fault_of_options
from tests.plain_options import PlainAnswer, plain_answer
from tests.tiny import (
    EOS,
    SYSTEMS,
    VOCAB_SIZE,
    PlainDecoder,
    TinyPipeline,
    draft_by_name,
    mixed_model,
    system_config,
    tiny_runner,
    tiny_target,
)
from tests.tiny_grammar import STRUCTURED, allowed_by, compiler, is_valid, text_of

PROMPT = [17, 3, 99, 42, 8, 17, 3]
RAW = Sampling(max_tokens=1, seed=0)
"""Greedy without options: its law is the logits themselves."""
MAX_TOKENS = 32


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
    structured = sampling.structured_outputs
    return plain_answer(
        lambda tokens: _logits(tuple(tokens)),
        PROMPT,
        sampling,
        eos=EOS,
        allowed=None if structured is None else allowed_by(structured),
    )


def _sampling(name: str, **options: Any) -> Sampling:
    return Sampling(
        **{
            "max_tokens": MAX_TOKENS,
            "seed": 11,
            "structured_outputs": STRUCTURED[name],
            # Endings and separators are rare in the random models.
            "logit_bias": {EOS: 2.0},
            **options,
        }
    )


def _run(
    system: str,
    samplings: Mapping[str, Sampling],
    *,
    draft: str | DraftSource = "noisy",
    max_requests: int = 6,
    order_seed: int | None = None,
    config: RunConfig | None = None,
    hold: Hold | None = None,
) -> tuple[dict[str, PlainAnswer], list[Committed]]:
    target = tiny_target()
    source = draft
    if isinstance(source, str):
        source = draft_by_name(source, target, page_size=4, grammars=compiler())
    pipeline = TinyPipeline(
        config or system_config(system, max_requests=max_requests),
        target,
        None if system == "autoregressive" else source,
        order_seed=order_seed,
        grammars=compiler(),
    )
    pipeline.runtime.hold = hold
    for name, sampling in samplings.items():
        pipeline.submit(name, PROMPT, sampling)
    pipeline.finish(*samplings)
    answers = {}
    for name in samplings:
        end = pipeline.recorder.end(name)
        assert end is not None
        assert end.finish_reason is not None
        answers[name] = PlainAnswer(
            token_ids=pipeline.recorder.tokens(name),
            finish_reason=end.finish_reason.value,
            stop_reason=end.stop_reason,
        )
    return answers, pipeline.recorder.committed


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Sampling, PlainAnswer]]:
    """Each kind alone, greedy and by chance, with what plain decoding returns."""
    torch.set_num_threads(1)
    requests = {}
    for name in STRUCTURED:
        for temperature, seed in ((0.0, 1), (1.0, 2)):
            sampling = _sampling(name, temperature=temperature, seed=seed)
            requests[f"{name} at {temperature} with seed {seed}"] = sampling, _expected(sampling)
    return requests


def _check_text(label: str, answer: PlainAnswer) -> None:
    if answer.finish_reason == "stop":
        assert answer.token_ids[-1] == EOS
        assert is_valid(label.split(" at ")[0], answer.token_ids), text_of(answer.token_ids)


def test_the_references_end_by_themselves(alone: dict[str, tuple[Sampling, PlainAnswer]]) -> None:
    """Else what follows would only see beginnings of answers."""
    ended = {label for label, (_, answer) in alone.items() if answer.finish_reason == "stop"}
    assert len(ended) > len(alone) / 2
    for label, (_, answer) in alone.items():
        _check_text(label, answer)


@pytest.mark.parametrize(
    ("system", "draft"),
    [
        *((system, "noisy") for system in SYSTEMS),
        *itertools.product(("tree", "saguaro"), ("ngram", "scripted")),
    ],
)
def test_every_kind_in_every_system(
    system: str, draft: str, alone: dict[str, tuple[Sampling, PlainAnswer]]
) -> None:
    """Also with drafts that know no grammar, whose tokens are then mostly excluded."""
    answers, _ = _run(system, {label: sampling for label, (sampling, _) in alone.items()}, draft=draft)
    assert answers == {label: expected for label, (_, expected) in alone.items()}


def _drawn(case: int) -> Sampling:
    generator = random.Random(case)

    def maybe(value: Any, neutral: Any) -> Any:
        return value if generator.random() < 0.5 else neutral

    max_tokens = generator.randint(1, MAX_TOKENS)
    return _sampling(
        generator.choice(list(STRUCTURED)),
        max_tokens=max_tokens,
        seed=generator.getrandbits(53),
        temperature=generator.choice([0.0, 0.6, 1.0, 1.7]),
        top_k=maybe(generator.randint(1, 20), 0),
        top_p=maybe(generator.uniform(0.3, 1), 1.0),
        min_p=maybe(generator.uniform(0, 0.2), 0.0),
        min_tokens=maybe(generator.randint(0, max_tokens), 0),
        stop_token_ids=maybe(generator.sample(range(VOCAB_SIZE), 4), []),
        presence_penalty=maybe(generator.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(generator.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(generator.uniform(0.5, 2), 1.0),
        logit_bias=maybe({token: generator.uniform(-8, 3) for token in range(5, VOCAB_SIZE, 9)}, {}),
        logprobs=maybe(2, None),
    )


@pytest.mark.parametrize(("system", "order_seed"), [*((s, None) for s in SYSTEMS), ("saguaro_tree", 5)])
def test_together_with_every_other_option(system: str, order_seed: int | None) -> None:
    """And beside free requests, whatever is a hit or a miss by the order of messages."""
    samplings = {f"case {case}": _drawn(case) for case in range(10)}
    samplings["free"] = Sampling(max_tokens=20, seed=5, temperature=1.0)
    expected = {name: _expected(sampling) for name, sampling in samplings.items()}
    answers, _ = _run(system, samplings, order_seed=order_seed)
    assert answers == expected


def test_min_tokens_gives_way_to_a_complete_answer() -> None:
    """Nothing but the end may follow `yes`, so that it comes before `min_tokens`."""
    sampling = _sampling("choice", structured_outputs=StructuredOutputs(choice=["yes"]), min_tokens=20)
    expected = _expected(sampling)
    assert (text_of(expected.token_ids), expected.finish_reason) == (b"yes", "stop")
    assert len(expected.token_ids) < 20
    for system in SYSTEMS:
        assert _run(system, {"r": sampling})[0] == {"r": expected}


@pytest.mark.parametrize("system", SYSTEMS)
def test_max_tokens_cuts_an_answer(system: str) -> None:
    samplings = {f"{size}": _sampling("schema", max_tokens=size) for size in range(1, 6)}
    answers, _ = _run(system, samplings)
    assert answers == {name: _expected(sampling) for name, sampling in samplings.items()}
    assert {answer.finish_reason for answer in answers.values()} == {"length"}


@pytest.mark.parametrize("system", ["speculative", "saguaro_tree"])
def test_several_samples_have_the_same_grammar_and_seeds_of_their_own(system: str) -> None:
    base = _sampling("words", temperature=1.0)
    samplings = {f"r/{i}": msgspec.structs.replace(base, seed=sample_seed(base.seed, i)) for i in range(4)}
    answers, _ = _run(system, samplings)
    assert answers == {name: _expected(sampling) for name, sampling in samplings.items()}
    assert len({tuple(answer.token_ids) for answer in answers.values()}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("system", ["speculative", "ssd", "saguaro"])
def test_a_draft_that_is_the_target_is_always_right(system: str, temperature: float) -> None:
    """It follows the grammar along the paths that it proposes; what comes after an end is no outcome."""
    outcomes: list[Outcome] = []

    def look(sender: StageName, receiver: StageName, message: Message) -> bool:
        if isinstance(message, Outcome) and receiver is StageName.SPECULATOR:
            outcomes.append(message)
        return False

    samplings = {name: _sampling(name, temperature=temperature) for name in STRUCTURED}
    _run(system, samplings, draft="oracle", hold=look)
    num_accepted = [outcome.num_accepted for outcome in outcomes]
    assert num_accepted == [outcome.num_proposed for outcome in outcomes]
    assert sum(num_accepted) > 50


@pytest.mark.parametrize(
    ("system", "drawing"),
    [
        ("speculative", Drawing.COUPLED),
        ("saguaro_tree", Drawing.COUPLED),
        ("tree", Drawing.DRAWN),
        ("saguaro", Drawing.DRAWN),
    ],
)
def test_a_reduced_head_that_lacks_what_the_grammar_wants(system: str, drawing: Drawing) -> None:
    """Every third token only: some rows have no allowed token at all, and nothing is proposed there."""
    target = tiny_target()
    head_token_ids = torch.arange(EOS, VOCAB_SIZE, 3)
    model = mixed_model(target, share=0.25)
    reduced = replace(model, weights=replace(model.weights, head=model.weights.head[head_token_ids]))
    config = system_config(system, max_requests=6)
    if drawing is Drawing.DRAWN:
        config.speculation.verification = Verification.rejection
        if config.speculation.tree.nodes is not None:
            config.speculation.tree = TreeConfig(widths=[3, 2, 1])
    source = ModelDraft(
        tiny_runner(reduced, page_size=4),
        vocab_size=VOCAB_SIZE,
        head_token_ids=head_token_ids,
        num_ranked=3,
        drawing=drawing,
        grammars=compiler(),
    )
    samplings = {
        f"{name} at {temperature}": _sampling(name, temperature=temperature)
        for name in STRUCTURED
        for temperature in (0.0, 1.0)
    }
    answers, _ = _run(system, samplings, draft=source, config=config)
    for label, answer in answers.items():
        _check_text(label, answer)
        if drawing is Drawing.COUPLED or label.endswith(" 0.0"):
            assert answer == _expected(samplings[label]), label


@pytest.mark.parametrize("system", SYSTEMS[1:])
def test_the_rejection_rule_never_leaves_the_grammar(system: str) -> None:
    """At temperature 0 it returns plain decoding's tokens; above, others, but always valid ones."""
    config = system_config(system, max_requests=6)
    config.speculation.verification = Verification.rejection
    if config.speculation.tree.nodes is not None:
        config.speculation.tree = TreeConfig(widths=[3, 2, 1])
    draft = draft_by_name("noisy", tiny_target(), page_size=4, drawing=Drawing.DRAWN, grammars=compiler())
    samplings = {
        f"{name} at {temperature} with seed {seed}": _sampling(name, temperature=temperature, seed=seed)
        for name in STRUCTURED
        for temperature, seed in ((0.0, 1), (1.2, 2))
    }
    answers, _ = _run(system, samplings, draft=draft, config=config)
    for label, answer in answers.items():
        _check_text(label, answer)
        allowed = allowed_by(STRUCTURED[label.split(" at ")[0]])
        for index, token in enumerate(answer.token_ids):
            assert allowed(answer.token_ids[:index])[token], label
        if " at 0.0" in label:
            assert answer == _expected(samplings[label])


def test_a_grammar_that_cannot_be_completed_fails_its_request_alone() -> None:
    """No token spells a `q`: the answer is stuck, and the others go on."""
    stuck = _sampling("choice", structured_outputs=StructuredOutputs(regex="[qQ]"))
    later = _sampling("choice", structured_outputs=StructuredOutputs(regex="(?:ab){3}[qQ]"))
    fine = _sampling("words")
    for system in ("autoregressive", "speculative", "saguaro_tree"):
        target = tiny_target()
        source = None
        if system != "autoregressive":
            source = draft_by_name("noisy", target, page_size=4, grammars=compiler())
        pipeline = TinyPipeline(system_config(system, max_requests=3), target, source, grammars=compiler())
        for name, sampling in (("stuck", stuck), ("later", later), ("fine", fine)):
            pipeline.submit(name, PROMPT, sampling)
        pipeline.finish("fine")
        failures = {m.request_id: m.failure for m in pipeline.recorder.committed if m.failure is not None}
        assert failures.keys() == {"stuck", "later"}
        assert "cannot be completed" in str(failures["stuck"])
        assert pipeline.recorder.tokens("fine") == _expected(fine).token_ids
        # The pages of the failed ones are free, and so is their place.
        pipeline.submit("next", PROMPT, fine)
        pipeline.finish("next")


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone() -> None:
    target = tiny_target()
    pipeline = TinyPipeline(
        system_config("speculative", max_requests=2),
        target,
        draft_by_name("noisy", target, page_size=4, grammars=compiler()),
        grammars=compiler(),
    )
    pipeline.submit("bad", PROMPT, _sampling("words", structured_outputs=StructuredOutputs(regex="(a")))
    pipeline.submit("fine", PROMPT, _sampling("words"))
    pipeline.finish("fine")
    (failed,) = pipeline.runtime.outputs
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == "bad"
    assert "structured_outputs.regex cannot be compiled" in failed.reason


def test_what_contradicts_a_grammar_is_refused() -> None:
    sampling = _sampling("words", ignore_eos=True)
    assert "ignore_eos" in str(fault_of_options(sampling, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE))
    sampling = _sampling("words")
    assert fault_of_options(sampling, eos_token_ids=[EOS], vocab_size=VOCAB_SIZE) is None
    fault = fault_of_options(sampling, eos_token_ids=[], vocab_size=VOCAB_SIZE)
    assert "end-of-sequence token" in str(fault)
