"""Structured outputs of the tiny models: a table of 128 tokens, requests, and references of their laws.

For regular expressions the reference is the `regex` package, which tells whether a text can still become a
match: no code of ours, and none of the matcher's. For grammars and schemas it is a fresh matcher for every
text, without any walking back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache

import regex
import torch

from pipeline.messages import StructuredOutputs
from stages.grammar import GrammarCompiler
from stages.token_bytes import TokenBytes
from tests.tiny import EOS, VOCAB_SIZE

_PIECES = [
    *(bytes([byte]) for byte in b'abcdefhlnorstuxyz0123456789.-+ \n"{}[],:\\/_'),
    *(b"ab", b"ba", b"abc", b"cab", b"bc", b"12", b"345", b'":', b'{"', b'"}', b'", "', b"true", b"false"),
    *(b"yes", b"no", b"ye", b"es", b" a", b"  ", b'"a"', b'"a":', b"xyz", b"yz", b"null", b"}}", b"]}"),
    *("é".encode(), "é".encode()[:1], "é".encode()[1:], "é".encode()[1:] + b"x", "京".encode()[:2]),
    *("京".encode()[2:], b"ab"),
]
FIRST_PIECE = 10
_STRING = r'"(?:\\.|[^"\\])*"'


def _table() -> TokenBytes:
    """Ids before the pieces have no text, nor have those after them. The end-of-sequence token spells `x`."""
    by_id = [b""] * VOCAB_SIZE
    by_id[FIRST_PIECE : FIRST_PIECE + len(_PIECES)] = _PIECES
    by_id[EOS] = b"x"
    return TokenBytes(by_id=by_id)


TABLE = _table()

REGEXES = {
    "words": r"(?:ab|cab|bc){2,5}(?:\.[0-9]{1,3})?",
    "numbers": r"-?(?:0|[1-9][0-9]{0,4})\.[0-9]+e?",
    "characters": r"é{1,3}(?:京x|é)*y?",
    "spaces": r"[ab]+ {2,6}(?:yes|no)",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "array", "items": {"enum": [True, False, None, "xyz"]}, "maxItems": 3},
        "c": {"type": "string", "maxLength": 4},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
GRAMMAR = """
start: sum
sum: term ("+" term)~0..4
term: "(" sum ")" | NUMBER
NUMBER: /[0-9]{1,2}/
"""
CHOICES = ["yes", "no", "ye.no", "abc", "abcab é"]

STRUCTURED: dict[str, StructuredOutputs] = {
    **{name: StructuredOutputs(regex=pattern) for name, pattern in REGEXES.items()},
    "choice": StructuredOutputs(choice=CHOICES),
    "schema": StructuredOutputs(json=json.dumps(SCHEMA)),
    "compact": StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True),
    "grammar": StructuredOutputs(grammar=GRAMMAR.replace('"(" sum ")"', '"[" sum "]"')),
}


@cache
def compiler() -> GrammarCompiler:
    """For the table."""
    return GrammarCompiler(table=TABLE)


def text_of(output: Sequence[int]) -> bytes:
    """The bytes of output tokens, without an end-of-sequence token."""
    return b"".join(TABLE.by_id[token] for token in output if token != EOS)


def allowed_by(structured: StructuredOutputs) -> Callable[[Sequence[int]], torch.Tensor]:
    """The reference: from output tokens to which tokens may follow, [V] bool."""
    if structured.regex is not None:
        return lambda output: _allowed_by_regex(structured.regex or "", text_of(output))
    if structured.choice:
        pattern = "|".join(regex.escape(text) for text in structured.choice)
        return lambda output: _allowed_by_regex(pattern, text_of(output))

    def allowed(output: Sequence[int]) -> torch.Tensor:
        state = compiler().begin(structured, eos_token_ids=[EOS])
        for token in output:
            state.commit([token])
        mask = state.mask([])
        assert mask is not None
        return torch.from_numpy(mask)

    return allowed


@cache
def _allowed_by_regex(pattern: str, text: bytes) -> torch.Tensor:
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    for token, piece in enumerate(TABLE.by_id):
        if piece and token != EOS:
            allowed[token] = _may_become(pattern, text + piece)
    allowed[EOS] = _is_complete(pattern, text)
    return allowed


def _may_become(pattern: str, text: bytes) -> bool:
    """Whether bytes, which may end within a character, begin a text that matches."""
    for size in range(len(text), max(len(text) - 4, -1), -1):
        try:
            whole = text[:size].decode()
            break
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return False
    else:
        return False
    rest = text[size:]
    if not rest:
        return regex.fullmatch(pattern, whole, partial=True) is not None
    characters = {chr(code) for code in (*range(0x80, 0x250), *map(ord, pattern))}
    return any(
        regex.fullmatch(pattern, whole + character, partial=True) is not None
        for character in characters
        if character.encode().startswith(rest)
    )


def _is_complete(pattern: str, text: bytes) -> bool:
    try:
        return regex.fullmatch(pattern, text.decode()) is not None
    except UnicodeDecodeError:
        return False


def is_valid(name: str, output: Sequence[int]) -> bool:
    """Whether the text of a finished answer is what was asked for; each kind by its own means."""
    structured, text = STRUCTURED[name], text_of(output).decode()
    if structured.regex is not None:
        return regex.fullmatch(structured.regex, text) is not None
    if structured.choice:
        return text in structured.choice
    if structured.grammar is not None:
        return regex.fullmatch(r"(?P<s>(?P<t>\[(?&s)\]|[0-9]{1,2})(?:\+(?&t)){0,4})", text) is not None
    value = json.loads(text)
    return (
        set(value) == {"a", "b", "c"}
        and isinstance(value["a"], int)
        and all(item in (True, False, None, "xyz") for item in value["b"])
        and len(value["b"]) <= 3
        and len(value["c"]) <= 4
        and not (structured.disable_any_whitespace and regex.search(r"\s", regex.sub(_STRING, "", text)))
    )
