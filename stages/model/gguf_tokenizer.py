"""Turns the tokenizer inside a .gguf file into tokenizer.json and tokenizer_config.json.

Byte-level BPE only, with the pre-tokenizers that the file format names: a wrong one would split text
differently from how the model was trained, and nobody would notice. Other tokenizers are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from pipeline.errors import ConfigError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as in ByteLevel
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEX_BY_PRE_TOKENIZER = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _GPT2,
    "llama-bpe": _CL100K.replace("{DIGITS}", "{1,3}"),
    "qwen2": _CL100K.replace("{DIGITS}", ""),
}
_SPLITS_DIGITS_FIRST = ("smollm",)
_ADDS_BOS_BY_DEFAULT = ("llama-bpe",)


class _TokenType(IntEnum):
    """What the file says of a token."""

    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(path: Path, fields: Mapping[str, Any], folder: Path) -> None:
    """Write both files to `folder`. path: for errors; fields: the file's metadata. Raises `ConfigError`."""
    kind = fields.get("tokenizer.ggml.model")
    pre_tokenizer = fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre_tokenizer not in _REGEX_BY_PRE_TOKENIZER:
        raise ConfigError(
            f"{path} has a tokenizer of kind {kind!r} with pre-tokenizer {pre_tokenizer!r}; expected 'gpt2' "
            f"with one of {', '.join(_REGEX_BY_PRE_TOKENIZER)}. Use the model's safetensors folder instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    tokenizer = _byte_level_bpe(tokens, fields, pre_tokenizer)
    special = {
        name: tokens[fields[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if key in fields
    }
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", pre_tokenizer in _ADDS_BOS_BY_DEFAULT)
    if adds_bos and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B:1"],
            special_tokens=[(bos, fields["tokenizer.ggml.bos_token_id"])],
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    template = fields.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level_bpe(tokens: list[str], fields: Mapping[str, Any], pre_tokenizer: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, without replaying merges.
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre_tokenizer == "llama-bpe")
    tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if pre_tokenizer in _SPLITS_DIGITS_FIRST:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.Split(Regex(_REGEX_BY_PRE_TOKENIZER[pre_tokenizer]), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if token_type == _TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer
