"""A draft must name the target's ids; reserved and padded ids at the end do not matter."""

import pytest
from tokenizers import Tokenizer, models

from pipeline.errors import ConfigError
from stages.vocabulary import check_same_vocabulary, load_tokenizer
from tests.tiny_tokenizers import byte_fallback, byte_level, save_model_folder

WORDS = ["the", "a", "cat", "dog", "sat"]


def folder_with(folder, tokens):
    model = models.WordLevel({token: token_id for token_id, token in enumerate(tokens)}, unk_token="the")
    return save_model_folder(folder, Tokenizer(model))


def test_equal_vocabularies_are_accepted(tmp_path):
    target = save_model_folder(tmp_path / "target", byte_level())
    draft = save_model_folder(tmp_path / "draft", byte_level())
    check_same_vocabulary(target, draft)


@pytest.mark.parametrize("tail", [["<pad>"], [f"<reserved_{i}>" for i in range(20)]])
def test_a_padded_tail_is_accepted_on_either_side(tmp_path, tail):
    plain = folder_with(tmp_path / "plain", WORDS)
    padded = folder_with(tmp_path / "padded", WORDS + tail)
    check_same_vocabulary(plain, padded)
    check_same_vocabulary(padded, plain)


def test_permuted_ids_are_refused_with_the_first_token_that_differs(tmp_path):
    target = folder_with(tmp_path / "target", WORDS)
    draft = folder_with(tmp_path / "draft", ["the", "a", "dog", "cat", "sat"])
    with pytest.raises(ConfigError, match="token 'cat' has id 2 in the target and 3 in the draft"):
        check_same_vocabulary(target, draft)


def test_another_token_at_the_same_id_is_refused(tmp_path):
    target = folder_with(tmp_path / "target", WORDS)
    draft = folder_with(tmp_path / "draft", ["the", "a", "cat", "bird", "sat"])
    with pytest.raises(ConfigError, match="id 3 is 'dog' in the target and 'bird' in the draft"):
        check_same_vocabulary(target, draft)


def test_added_tokens_count(tmp_path):
    changed = byte_level()
    changed.add_tokens(["<tool>"])
    other = byte_level()
    other.add_tokens(["<call>"])
    target = save_model_folder(tmp_path / "target", changed)
    draft = save_model_folder(tmp_path / "draft", other)
    with pytest.raises(ConfigError, match="'<tool>' in the target and '<call>' in the draft"):
        check_same_vocabulary(target, draft)


def test_vocabularies_of_two_families_are_refused(tmp_path):
    target = save_model_folder(tmp_path / "target", byte_level())
    draft = save_model_folder(tmp_path / "draft", byte_fallback())
    with pytest.raises(ConfigError, match="does not have the target's vocabulary"):
        check_same_vocabulary(target, draft)


def test_a_damaged_tokenizer_is_a_configuration_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a tokenizer"):
        load_tokenizer(tmp_path)
