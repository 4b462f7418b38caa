"""Grammars: which tokens they allow, along paths and back; what is refused; the bytes of tokens."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import RequestError
from pipeline.messages import StructuredOutputs
from stages.grammar import GrammarChecker, GrammarCompiler
from stages.model.grammar_mask import GrammarMask
from stages.token_bytes import TokenBytes, read_token_bytes
from stages.vocabulary import load_tokenizer
from tests.tiny import EOS, VOCAB_SIZE
from tests.tiny_grammar import STRUCTURED, TABLE, allowed_by, compiler, is_valid
from tests.tiny_tokenizers import byte_fallback, byte_level, metaspace, save_model_folder, word_piece


@pytest.mark.parametrize("name", STRUCTURED)
def test_masks_are_those_of_the_reference_on_random_walks(name: str) -> None:
    """Every token that the reference allows, and no other, whatever was asked of the state before."""
    generator = random.Random(name)
    reference = allowed_by(STRUCTURED[name])
    num_ends = 0
    for _ in range(12):
        state, output = compiler().begin(STRUCTURED[name], eos_token_ids=[EOS]), list[int]()
        while len(output) < 100:
            expected = reference(output)
            _wander(state, reference, output, generator)
            mask = state.mask([])
            assert mask is not None
            assert mask.tolist() == expected.tolist()
            token = generator.choice(expected.nonzero()[:, 0].tolist())
            if token == EOS:
                assert state.fault([]) is None
                assert is_valid(name, output)
                num_ends += 1
                break
            state.commit([token])
            output.append(token)
    assert num_ends > 0


def _wander(state, reference, output, generator) -> None:
    """Masks along a path, some of it not allowed, as rows of a tree ask for them."""
    path = list[int]()
    for _ in range(generator.randint(0, 4)):
        expected = reference([*output, *path])
        mask = state.mask(path)
        assert mask is not None
        assert mask.tolist() == expected.tolist()
        excluded = int((~expected).nonzero()[0, 0])
        assert state.mask([*path, excluded, EOS]) is None
        if excluded != EOS:
            assert state.mask([*path, excluded]) is None
        path.append(generator.choice(expected.nonzero()[:, 0].tolist()))
        if path[-1] == EOS:
            assert state.mask(path) is None
            break


def test_an_end_that_the_grammar_does_not_accept_is_told_from_one_that_it_does() -> None:
    """No token spells a `q`, so that the answer cannot be completed after `ab`."""
    state = compiler().begin(StructuredOutputs(regex="abq|ba"), eos_token_ids=[EOS])
    ab, ba = TABLE.by_id.index(b"ab"), TABLE.by_id.index(b"ba")
    mask = state.mask([])
    assert mask is not None
    assert mask[ba]
    if mask[ab]:
        after = state.mask([ab])
        assert after is not None
        assert np.flatnonzero(after).tolist() == [EOS]
        assert state.fault([ab]) is not None
    assert state.fault([ba]) is None
    assert state.fault([]) is not None


def test_a_grammar_without_any_first_token_is_a_fault() -> None:
    state = compiler().begin(StructuredOutputs(regex="[qQ]+"), eos_token_ids=[EOS])
    mask = state.mask([])
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [EOS]
    assert state.fault([]) is not None
    assert state.mask([]) is not None, "a state goes on after an error of its matcher"


def test_every_end_of_sequence_token_is_allowed_where_one_is() -> None:
    state = compiler().begin(StructuredOutputs(choice=["yes"]), eos_token_ids=[EOS, 7, 300])
    state.commit([TABLE.by_id.index(b"yes")])
    mask = state.mask([])
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [EOS, 7, 300]


def test_compiled_grammars_are_kept_by_text_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.grammar._MOST_COMPILED", 2)
    grammars, compiled = GrammarCompiler(table=TABLE), []
    compile_ = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda s: (compiled.append(s.regex), compile_(s))[1])
    for pattern in ("a", "b", "a", "ab", "a", "b"):
        grammars.begin(StructuredOutputs(regex=pattern), eos_token_ids=[EOS])
    assert compiled == ["a", "b", "ab", "b"]


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (StructuredOutputs(regex="(a"), "structured_outputs.regex cannot be compiled: .*unclosed group"),
        (StructuredOutputs(regex="(?=a)b"), "look-around"),
        (StructuredOutputs(json='{"type": "objekt"}'), "structured_outputs.json .*Invalid type: objekt"),
        (StructuredOutputs(json='{"not": {}}'), "Unimplemented keys"),
        (StructuredOutputs(json="false"), "structured_outputs.json"),
        (StructuredOutputs(json='{"x-guidance": 3}'), "x-guidance is a JSON object"),
        (StructuredOutputs(grammar="start: foo"), 'structured_outputs.grammar .*unknown name: "foo"'),
        (StructuredOutputs(grammar="root ::= ("), "structured_outputs.grammar"),
    ],
)
def test_a_broken_grammar_is_refused_with_its_reason(
    structured: StructuredOutputs, reason: str, tmp_path: Path
) -> None:
    folder = save_model_folder(tmp_path, byte_level())
    with pytest.raises(RequestError, match=reason):
        GrammarChecker(folder).check(structured)
    with pytest.raises(RequestError, match=reason):
        compiler().begin(structured, eos_token_ids=[EOS])


def test_without_the_package_the_option_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llguidance" else find_spec(name)
    )
    folder = save_model_folder(tmp_path, byte_level())
    with pytest.raises(RequestError, match=r"llguidance.*pip install 'saguaro-engine\[structured\]'"):
        GrammarChecker(folder).check(StructuredOutputs(json_object=True))


@pytest.mark.parametrize("make", [metaspace, word_piece])
def test_a_tokenizer_without_known_bytes_is_refused_by_name(make, tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path, make())
    with pytest.raises(
        RequestError, match=r"structured_outputs: expected a byte-level tokenizer.*decoded by"
    ):
        GrammarChecker(folder).check(StructuredOutputs(json_object=True))
    with pytest.raises(RequestError, match="structured_outputs: expected a byte-level tokenizer"):
        GrammarCompiler(folder=folder).begin(StructuredOutputs(json_object=True), eos_token_ids=[0])


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_tokens_add_up_to_the_text(make, tmp_path: Path) -> None:
    """Of random tokens, valid as UTF-8 or not: U+FFFD aside, the decoder says the same."""
    folder = save_model_folder(tmp_path, make())
    tokenizer, table = load_tokenizer(folder), read_token_bytes(folder)
    assert len(table.by_id) == tokenizer.get_vocab_size()
    for sample in ("The quick brown fox", "Grüße aus Köln! 東京と 🌵", "a<think>b added word", "  x  \n"):
        token_ids = tokenizer.encode(sample, add_special_tokens=False).ids
        expected = tokenizer.decode(token_ids, skip_special_tokens=True)
        text = b"".join(table.by_id[token] for token in token_ids).decode()
        assert text.removeprefix(" " if table.drops_first_space else "") == expected
    generator = random.Random(1)
    for _ in range(300):
        token_ids = generator.choices(range(len(table.by_id)), k=generator.randint(1, 8))
        data = b"".join(table.by_id[token] for token in token_ids)
        expected = tokenizer.decode(token_ids, skip_special_tokens=True)
        if "\ufffd" not in expected and "\ufffd" not in data.decode(errors="replace"):
            assert data.decode().removeprefix(" " if table.drops_first_space else "") == expected


def test_no_answer_begins_with_a_space_that_the_decoder_would_drop(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path, byte_fallback())
    grammars, table = GrammarCompiler(folder=folder), read_token_bytes(folder)
    state = grammars.begin(StructuredOutputs(regex=" *(?:the|he)"), eos_token_ids=[2])
    mask = state.mask([])
    assert mask is not None
    assert not any(table.by_id[token].startswith(b" ") for token in np.flatnonzero(mask))
    assert mask.any()


def test_the_vocabulary_is_read_in_a_thread(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path, byte_level())
    grammars = GrammarCompiler(folder=folder)
    grammars.prepare()
    assert grammars.begin(StructuredOutputs(regex="a+"), eos_token_ids=[0]).mask([]) is not None
    refused = GrammarCompiler(folder=save_model_folder(tmp_path / "other", word_piece()))
    refused.prepare()
    with pytest.raises(RequestError):
        refused.begin(StructuredOutputs(regex="a+"), eos_token_ids=[0])


def test_a_reduced_head_may_have_none_of_the_allowed_tokens() -> None:
    state = compiler().begin(StructuredOutputs(choice=["yes", "no"]), eos_token_ids=[EOS])
    yes, no = TABLE.by_id.index(b"yes"), TABLE.by_id.index(b"no")
    logits = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    paths = [[], [no]]
    has_yes = GrammarMask(state, torch.tensor([3, yes, VOCAB_SIZE + 9])).apply(logits, logits, paths)
    assert has_yes[0].tolist() == [-torch.inf, logits[0, 1].item(), -torch.inf]
    assert has_yes[1].tolist() == [-torch.inf] * 3


def test_the_grammar_wins_over_a_ban_that_would_leave_nothing() -> None:
    state = compiler().begin(StructuredOutputs(choice=["no"]), eos_token_ids=[EOS])
    no = TABLE.by_id.index(b"no")
    logits = torch.zeros(2, VOCAB_SIZE, dtype=torch.float64)
    banned = logits.clone()
    banned[:, EOS] = -torch.inf
    masked = GrammarMask(state, torch.arange(VOCAB_SIZE)).apply(banned, logits, [[], [no]])
    assert masked[1].argmax() == EOS
    assert masked[1].isfinite().sum() == 1
    assert masked[0, EOS] == -torch.inf


def test_whitespace_between_the_parts_of_json_is_bounded() -> None:
    """As many characters as 10 levels of nesting are indented by, and more, but not endlessly many."""
    table = TokenBytes(by_id=[b"", b"{", b" ", b"\n", b'"', b"}"])
    for schema, most in (({}, 32), ({"x-guidance": {"whitespace_pattern": "[ ]{1,3}"}}, 3)):
        structured = StructuredOutputs(json=json.dumps({"type": "object", **schema}))
        state = GrammarCompiler(table=table).begin(structured, eos_token_ids=[0])
        state.commit([1])
        count = 0
        while count < 50 and (mask := state.mask([])) is not None and mask[2]:
            state.commit([2])
            count += 1
        assert count == most
