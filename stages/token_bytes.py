"""What each token of a vocabulary adds to the text, as bytes: what a grammar is matched against.

Two kinds of tokenizers write a token the same wherever it stands: byte-level ones (Llama 3, Qwen, SmolLM2),
where every token is a string of bytes, and those with byte fallback (Llama 2, Mistral), where a `▁` is a
space. Decoders that join words by rules of their own are refused: no grammar could follow them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import RequestError

_FALLBACK_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """The table of one tokenizer."""

    by_id: list[bytes]
    """By token id; empty for special tokens and for ids that are no token: they have no text."""
    drops_first_space: bool = False
    """Whether the decoder drops a space that an answer begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    to_bytes: Callable[[str], bytes]
    """From a token as the vocabulary spells it."""
    drops_first_space: bool


def check_has_bytes(folder: Path) -> None:
    """Raise `RequestError` unless `read_token_bytes` can read the tokenizer of a local model folder."""
    _kind_of(_read(folder))


def read_token_bytes(folder: Path) -> TokenBytes:
    """The table of the tokenizer of a local model folder. Raises `RequestError` for other kinds."""
    settings = _read(folder)
    kind = _kind_of(settings)
    vocabulary: dict[str, int] = settings["model"]["vocab"]
    added = settings.get("added_tokens", [])
    by_id = [b""] * (1 + max([*vocabulary.values(), *(token["id"] for token in added)]))
    for token, token_id in vocabulary.items():
        by_id[token_id] = kind.to_bytes(token)
    for token in added:
        by_id[token["id"]] = b"" if token["special"] else kind.to_bytes(token["content"])
    return TokenBytes(by_id=by_id, drops_first_space=kind.drops_first_space)


def _read(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return settings


def _kind_of(settings: dict[str, Any]) -> _Kind:
    decoder = settings.get("decoder") or {"type": "none"}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if isinstance(settings["model"].get("vocab"), dict):
        if kinds == ["ByteLevel"]:
            return _Kind(to_bytes=_ByteLevel(), drops_first_space=False)
        replaced = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
        strips = [(step["content"], step["start"], step["stop"]) for step in steps if step["type"] == "Strip"]
        if (
            "ByteFallback" in kinds
            and set(kinds) <= _FALLBACK_STEPS
            and replaced == [({"String": "▁"}, " ")]
            and strips in ([], [(" ", 1, 0)])
        ):
            return _Kind(to_bytes=_fallback_bytes, drops_first_space=bool(strips))
    raise RequestError(
        "structured_outputs: expected a byte-level tokenizer, or one with byte fallback, because a grammar "
        f"is matched with the bytes of every token; this model's text is decoded by {' and '.join(kinds)}; "
        "leave the option out, or choose another model"
    )


class _ByteLevel:
    """From the printable characters that byte-level vocabularies are written in to the bytes they mean."""

    def __init__(self) -> None:
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        # What stands for no byte is mapped to a character that Latin-1 does not have: encoding fails there.
        self._table = dict.fromkeys(range(256), 0x10FFFF)
        self._table |= {byte: byte for byte in shown}
        self._table |= {0x100 + index: byte for index, byte in enumerate(hidden)}

    def __call__(self, token: str) -> bytes:
        try:
            return token.translate(self._table).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()  # as the decoder does with a token that is not written in bytes


def _fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
