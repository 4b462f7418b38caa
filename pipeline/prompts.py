"""The prompts of a run: from the command line, from a file, or built in.

A file is JSON Lines, each line an object with `prompt` (one question), `turns` (the user's side of a
conversation) or `prompt_token_ids` (what is encoded already) and maybe `sampling` (request options by name,
over those of the run), or plain text with one prompt a line. A line that is neither is an error with its
number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import ConfigError, shown, shown_path

BUILT_IN_PROMPTS = (
    "Write a Python function `is_palindrome(text)` that ignores spaces, case and punctuation. "
    "Explain it in one sentence.",
    "A baker sells 12 rolls at 35 cents each and 3 loaves at 2 euros 80 cents each. "
    "How much money does she take? Show the steps.",
    "I have one free day in a city by the sea and it is raining. What should I do?",
    "Summarise the following passage in two sentences.\n\n"
    "The saguaro is a tall cactus of the Sonoran Desert. It grows slowly: a plant of ten years may be no "
    "higher than a hand is wide, and the first arm often appears only after half a century. Its pleats widen "
    "like an accordion after rain, so that a large plant can store more than a tonne of water. Woodpeckers "
    "cut nests into the trunk, and when they leave, owls, wrens and lizards move in.",
)
"""Code, sums, chat and a summary: what a run answers when it is given nothing."""

_KINDS = ("prompt", "turns", "prompt_token_ids")
_EXPECTED = 'expected {"prompt": "..."}, {"turns": ["...", ...]} or {"prompt_token_ids": [1, 2, ...]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt or one conversation of a run."""

    index: int
    """Place among the rows of the run, from 0."""
    turns: tuple[str, ...]
    """What the user says: one text for a prompt, several for a conversation, none for token ids."""
    is_conversation: bool
    """Whether it was given as `turns`: it is then numbered by turn, and needs a chat template."""
    origin: str
    """Where it came from, for error messages: `prompt`, `prompts.jsonl:3` or `built-in prompt 2`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Request options of its own, by name; not checked yet."""
    token_ids: tuple[int, ...] | None = None
    """What the model reads, where that was given; whether a model has them is not checked yet."""


def rows_of_prompt(prompt: str) -> list[PromptRow]:
    """The single row of a prompt given on the command line. Raises `ConfigError` if it is no Unicode text."""
    _check_unicode(prompt, "prompt")
    return [PromptRow(index=0, turns=(prompt,), is_conversation=False, origin="prompt")]


def built_in_rows() -> list[PromptRow]:
    """The rows of a run that was given no prompt."""
    return [
        PromptRow(index=index, turns=(prompt,), is_conversation=False, origin=f"built-in prompt {index}")
        for index, prompt in enumerate(BUILT_IN_PROMPTS)
    ]


def read_prompts_file(path: Path) -> list[PromptRow]:
    """Read every row of a file; blank lines do not count.

    It is JSON Lines if its first line that is not blank starts with `{` or its name ends in .json or .jsonl,
    and plain text otherwise. Raises `ConfigError` for a file that cannot be read, for the first bad line,
    and for a file without prompts.
    """
    lines = [(number, line) for number, line in enumerate(_read_lines(path), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"prompts_file={shown_path(path)} has no prompts, expected one a line")
    is_json = path.suffix in (".json", ".jsonl") or lines[0][1].lstrip().startswith("{")
    rows = []
    for index, (number, line) in enumerate(lines):
        origin = f"{shown_path(path)}:{number}"
        if is_json:
            row = _parse_row(line, index, origin)
        else:
            row = PromptRow(index=index, turns=(line,), is_conversation=False, origin=origin)
        for turn in row.turns:
            _check_unicode(turn, origin)
        rows.append(row)
    if not any(row.token_ids or any(row.turns) for row in rows):
        raise ConfigError(f"prompts_file={shown_path(path)} has only empty prompts, expected some text")
    return rows


def _read_lines(path: Path) -> list[str]:
    try:
        # utf-8-sig drops a byte order mark; reading with universal newlines ends lines at CRLF as well.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"prompts_file={shown_path(path)} is not UTF-8 text ({error}); convert it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"prompts_file={shown_path(path)} cannot be read: {error.strerror}; check the path"
        ) from None
    # Not splitlines(): it would also cut at U+2028 and the like, which stand unescaped in valid JSON.
    return text.split("\n")


def _parse_row(line: str, index: int, origin: str) -> PromptRow:
    """The row of a JSON line. Keys of the object that mean nothing here are data."""
    row = _parse_object(line, origin)
    options = row.get("sampling", {})
    if not isinstance(options, dict):
        raise ConfigError(
            f'{origin}: expected options such as "sampling": {{"temperature": 0.5}}, got {shown(options)}'
        )
    turns: tuple[str, ...] = ()
    token_ids = None
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise ConfigError(f"{origin}: {_EXPECTED}, got a prompt that is no text: {shown(line.strip())}")
        turns = (row["prompt"],)
    elif "turns" in row:
        turns = _turns(row["turns"], line, origin)
    else:
        token_ids = _token_ids(row["prompt_token_ids"], line, origin)
    return PromptRow(
        index=index,
        turns=turns,
        is_conversation="turns" in row,
        origin=origin,
        options=options,
        token_ids=token_ids,
    )


def _parse_object(line: str, origin: str) -> dict[str, object]:
    """The object of a JSON line, with a prompt of exactly one kind."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:  # whose own text counts lines from this one
        reason = f"{error.msg} at column {error.colno}"
        raise ConfigError(f"{origin} is not JSON ({reason}); {_EXPECTED}") from None
    except ValueError as error:  # such as a number with too many digits
        raise ConfigError(f"{origin} is not JSON ({error}); {_EXPECTED}") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply to be read; {_EXPECTED}") from None
    if not isinstance(row, dict) or sum(kind in row for kind in _KINDS) != 1:
        raise ConfigError(f"{origin}: {_EXPECTED}, one of the three keys, got {shown(line.strip())}")
    return row


def _turns(turns: object, line: str, origin: str) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ConfigError(f"{origin}: {_EXPECTED} with a list of texts, got {shown(line.strip())}")
    if "" in turns:
        number = turns.index("") + 1
        raise ConfigError(
            f"{origin}: turn {number} is empty, expected some text in each; fill it or leave it out"
        )
    return tuple(turns)


def _token_ids(token_ids: object, line: str, origin: str) -> tuple[int, ...]:
    """Whole numbers. What no model has is left to fail alone, as an empty prompt is."""
    # A bool is an int, and JSON's true is no token.
    if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
        raise ConfigError(f"{origin}: {_EXPECTED} with a list of whole numbers, got {shown(line.strip())}")
    return tuple(token_ids)


def _check_unicode(text: str, origin: str) -> None:
    """Half a surrogate pair is no character: it stands for bytes that are not UTF-8, or a wrong escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{origin} is not valid Unicode text, expected UTF-8; convert it") from None
