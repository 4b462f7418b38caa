"""Grammars of structured outputs: which tokens may follow a text, so that it can still become what was asked.

A token is allowed if text and token together are the beginning of a text that the grammar accepts; which of
several spellings of a text is taken is left to the model. End-of-sequence tokens are allowed exactly where
the grammar accepts the text as it stands, and nothing follows them.

The law of a row depends on the path to its node, so the matcher is walked along the paths of a tree and back
(`GrammarState.mask`); it is one object a request, and its state a function of the tokens alone.

`llguidance` does the matching. It is an optional package, so it is imported when it is first needed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RequestError, shown
from pipeline.messages import Sampling, StructuredOutputs
from stages.token_bytes import TokenBytes, check_has_bytes, read_token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]

_MOST_COMPILED = 64
"""Compiled grammars that a process keeps, those used last."""
_MOST_OF_AN_ERROR = 300
_QUOTED = re.compile(r"\s*(?:\d+ \||\^+\s*$)")
"""A line of an error that quotes the grammar, which is not quite the one that was given."""
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Without it the matcher allows one spelling alone wherever the text is forced."""
_WHITESPACE = r"[ \t\n\r]{1,32}"
"""Between the parts of a JSON text: endless whitespace is valid too, and small models produce it."""


def is_installed() -> bool:
    """Whether the package that matches grammars is there."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarChecker:
    """Tells what cannot be served, without the table of a vocabulary: cheap, so that any process can."""

    def __init__(self, folder: Path) -> None:
        """folder: of the target model."""
        self._folder = folder
        self._has_bytes = False
        """Whether the tokenizer is known to be of a kind that has the bytes of its tokens."""

    def check(self, structured: StructuredOutputs) -> None:
        """Raise `RequestError` where package or tokenizer do not do, or the grammar is broken."""
        source = _lark_of(structured)
        from llguidance import LLMatcher

        if not self._has_bytes:
            check_has_bytes(self._folder)
            self._has_bytes = True
        is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(source))
        if is_error:
            raise _refused(structured, messages[0])


class GrammarCompiler:
    """Compiles the grammars of one process for one vocabulary, each text once."""

    def __init__(self, *, folder: Path | None = None, table: TokenBytes | None = None) -> None:
        """folder: of the target model, where the table of its vocabulary comes from; or the table itself."""
        self._folder = folder
        self._table = table
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._preparing: threading.Thread | None = None
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, path: str | None) -> GrammarCompiler:
        """For the model of a run, if it is one with a folder."""
        return cls(folder=None if path is None else Path(path))

    def prepare(self) -> None:
        """Start to read the vocabulary in a thread, where the package is installed, while models are loaded.

        It takes a few tenths of a second for 50,000 tokens, which would stall the requests that run when the
        first grammar comes.
        """
        if self._folder is not None and self._preparing is None and is_installed():
            self._preparing = threading.Thread(target=self._prepare, daemon=True)
            self._preparing.start()

    def begin(self, structured: StructuredOutputs, *, eos_token_ids: Collection[int]) -> GrammarState:
        """The state of a new answer.

        eos_token_ids: at least one; they are no text, whatever the vocabulary has them spell.
        Raises `RequestError` where the grammar cannot be served.
        """
        key = msgspec.msgpack.encode(structured)
        matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._compile(structured)
            self._compiled[key] = matcher
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        table = self._read_table()
        return GrammarState(
            matcher,
            num_text_ids=len(table.by_id),
            eos_token_ids=sorted(eos_token_ids),
            not_first=_with_space(table) if table.drops_first_space else None,
        )

    def _compile(self, structured: StructuredOutputs) -> LLMatcher:
        source = _lark_of(structured)
        from llguidance import LLMatcher

        matcher = LLMatcher(self._ready_tokenizer(), LLMatcher.grammar_from_lark(source), log_level=0)
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        return matcher

    def _ready_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _make_tokenizer(self._read_table())
        return self._tokenizer

    def _prepare(self) -> None:
        # A vocabulary of another kind is refused when a request needs it.
        try:
            self._ready_tokenizer()
        except RequestError:
            return

    def _read_table(self) -> TokenBytes:
        if self._table is None:
            if self._folder is None:
                raise RequestError("structured_outputs: this model has no tokenizer; leave the option out")
            self._table = read_token_bytes(self._folder)
        return self._table


def begin_grammar(
    grammars: GrammarCompiler | None, sampling: Sampling, *, eos_token_ids: Collection[int]
) -> GrammarState | None:
    """The state of an answer, None where it is free. Raises `RequestError` where it cannot be served."""
    if grammars is None or sampling.structured_outputs is None:
        return None
    return grammars.begin(sampling.structured_outputs, eos_token_ids=eos_token_ids)


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(
        self,
        start: LLMatcher,
        *,
        num_text_ids: int,
        eos_token_ids: Sequence[int],
        not_first: Mask | None = None,
    ) -> None:
        """start: the compiled grammar, before any text; not changed. num_text_ids: those of the vocabulary.

        not_first: tokens that no answer may begin with.
        """
        self._start = start
        self._matcher = start.deep_copy()
        self._num_text_ids = num_text_ids
        self._num_ids = max(num_text_ids, 1 + max(eos_token_ids))
        self._eos = list(eos_token_ids)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._not_first = not_first
        self._committed: list[int] = []
        self._walked: list[int] = []
        """Tokens beyond the committed ones that the matcher stands behind."""
        self._has_ended = False

    def commit(self, token_ids: Sequence[int]) -> None:
        """More output tokens; none of them may be one that the mask excluded."""
        for token in token_ids:
            if token in self._eos_token_ids:
                self._has_ended = True
                return
            self._committed.append(token)
        self._walk(token_ids)
        del self._walked[: len(token_ids)]

    def mask(self, path: Sequence[int]) -> Mask | None:
        """Which tokens may follow the committed ones and the path, by id; ids beyond the mask are none.

        None where the path itself is not allowed: nothing that follows it is ever asked for. Where the
        grammar cannot go on, end-of-sequence tokens are allowed alone; `fault` tells that from its end.
        """
        if self._has_ended or not self._eos_token_ids.isdisjoint(path):
            return None
        if not self._walk(path):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask: Mask = np.zeros(self._num_ids, dtype=np.bool_)
        is_broken = self._matcher.is_error()
        if not is_broken:
            mask[: self._num_text_ids] = np.unpackbits(bits, count=self._num_text_ids, bitorder="little")
            if self._not_first is not None and not self._committed and not path:
                mask[: len(self._not_first)] &= ~self._not_first
            mask[self._eos] = self._matcher.is_accepting()
        if not mask.any():
            mask[self._eos] = True
        if is_broken:
            self._restart()
        return mask

    def fault(self, path: Sequence[int]) -> str | None:
        """Why the grammar does not accept the committed tokens and the path as a whole text; None if it does.

        An end-of-sequence token that comes where there is one came because nothing else could.
        """
        if self._walk(path) and self._matcher.is_accepting():
            return None
        self._matcher.compute_bitmask()
        error = self._matcher.get_error()
        if error:
            self._restart()
        return _in_one_line(error) or "no token of the vocabulary can follow"

    def _walk(self, path: Sequence[int]) -> bool:
        """Bring the matcher behind the path; whether the grammar allows it."""
        common = 0
        for walked, wanted in zip(self._walked, path, strict=False):
            if walked != wanted:
                break
            common += 1
        if len(self._walked) > common:
            self._matcher.rollback(len(self._walked) - common)
            del self._walked[common:]
        rest = list(path[common:])
        num_taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._walked += rest[:num_taken]
        if self._matcher.is_error():
            self._restart()
            return False
        return num_taken == len(rest)

    def _restart(self) -> None:
        """An error is the last state of a matcher: walk anew from the start."""
        self._matcher = self._start.deep_copy()
        self._walked = []
        self._matcher.try_consume_tokens(self._committed)


class _Vocabulary:
    """What `llguidance.TokenizerWrapper` wraps."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = [eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("no spelling is forced, so nothing is ever encoded")


def _make_tokenizer(table: TokenBytes) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    # The matcher needs an end-of-sequence token; `GrammarState` knows which ids are some, so it gets its own.
    tokens = [*table.by_id, b""]
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, len(tokens) - 1)), n_vocab=len(tokens))


def _with_space(table: TokenBytes) -> Mask:
    return np.array([token.startswith(b" ") for token in table.by_id])


def _lark_of(structured: StructuredOutputs) -> str:
    """The grammar in Lark's notation, which all kinds have in common.

    Raises `RequestError` if the package is missing, or for a text that is no grammar of its kind at all.
    """
    if not is_installed():
        raise RequestError(
            "structured_outputs: expected the package llguidance, which is not installed; "
            "pip install 'saguaro-engine[structured]', or leave the option out"
        )
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    if structured.regex is not None:
        return f"start: /{regex_to_lark(structured.regex, '')}/{_NO_FORCING}"
    if structured.choice:
        return f"start: {' | '.join(json.dumps(text) for text in structured.choice)}{_NO_FORCING}"
    if structured.grammar is not None:
        try:
            return any_to_lark(structured.grammar) + _NO_FORCING
        except Exception as error:  # the package raises plain Exception
            raise _refused(structured, str(error)) from None
    return f"start: %json {json.dumps(_schema_of(structured))}{_NO_FORCING}"


def _schema_of(structured: StructuredOutputs) -> object:
    try:
        schema = {"type": "object"} if structured.json is None else json.loads(structured.json)
    except (ValueError, RecursionError) as error:
        raise _refused(structured, str(error)) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused(structured, "a schema is a JSON object")
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise _refused(structured, "x-guidance is a JSON object")
    if "whitespace_flexible" in own or "whitespace_pattern" in own:
        return schema
    is_flexible = not structured.disable_any_whitespace
    whitespace = {"whitespace_pattern": _WHITESPACE} if is_flexible else {"whitespace_flexible": False}
    return {**schema, "x-guidance": {**own, **whitespace}}


def _refused(structured: StructuredOutputs, error: str) -> RequestError:
    kinds = ("json", "json_object", "regex", "choice", "grammar")
    kind = next((kind for kind in kinds if getattr(structured, kind)), "json")
    return RequestError(f"structured_outputs.{kind} cannot be compiled: {_in_one_line(error)}; correct it")


def _in_one_line(error: str) -> str:
    """The part of an error of the package that is about the grammar, without the state of its parser."""
    lines = [line for line in error.partition("<state>")[0].splitlines() if not _QUOTED.match(line)]
    return shown(" ".join(" ".join(lines).split()), most=_MOST_OF_AN_ERROR)
