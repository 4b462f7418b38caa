"""The prompts of a bench: sets as they are published, or the tool's own.

JSON Lines, also compressed, as HumanEval's are (`HumanEval.jsonl.gz`); each line has `turns` (of which the
first counts), `prompt`, or `question`. Other keys are data.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, shown, shown_path

OWN_SET = Path(__file__).with_name("prompts.jsonl")
_OWN_NAME = "built-in"
_COMPRESSED = ".gz"
_KEYS = ("turns", "prompt", "question")
_EXPECTED = "expected an object with one of turns (a list of texts), prompt and question (a text)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """One prompt before any model has seen it."""

    set_name: str
    index: int
    """Place in its set, from 0."""
    text: str
    origin: str
    """`file.jsonl:3`, for errors."""


def read_sets(paths: str | None, *, num_prompts: int | None) -> list[PromptText]:
    """All prompts, set by set. paths: comma-separated; `built-in`, or None alone, is the tool's own set.

    num_prompts: the first so many of each set. Raises `ConfigError` for a file that cannot be read, a line
    that is no prompt, and two files of the same name.
    """
    parts = [_OWN_NAME] if paths is None else [part.strip() for part in paths.split(",")]
    files = [(part, OWN_SET) if part == _OWN_NAME else (_set_name(part), Path(part)) for part in parts]
    names = [name for name, _ in files]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"prompts={shown_path(paths or '')}: two sets are called {shown(name)}; rename a file"
            )
    return [prompt for name, path in files for prompt in _read_set(name, path, num_prompts)]


def _read_set(name: str, path: Path, num_prompts: int | None) -> list[PromptText]:
    try:
        lines = _read_text(path).split("\n")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"prompts={shown_path(path)} cannot be read: {error}; expected a .jsonl or .jsonl.gz file"
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts={shown_path(path)} has no prompts, expected one a line")
    prompts = []
    for index, (number, line) in enumerate(numbered[:num_prompts]):
        origin = f"{shown_path(path)}:{number}"
        prompts.append(PromptText(set_name=name, index=index, text=_text_of(line, origin), origin=origin))
    return prompts


def _set_name(path: str) -> str:
    return Path(path.removesuffix(_COMPRESSED)).stem


def _read_text(path: Path) -> str:
    if path.suffix != _COMPRESSED:
        return path.read_text(encoding="utf-8-sig")
    with gzip.open(path, "rt", encoding="utf-8-sig") as file:
        return file.read()


def _text_of(line: str, origin: str) -> str:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin} is not JSON ({error}); {_EXPECTED}") from None
    found: Sequence[str] = [key for key in _KEYS if isinstance(row, dict) and key in row]
    if len(found) != 1:
        raise ConfigError(f"{origin}: {_EXPECTED}, got {shown(line.strip())}")
    value = row[found[0]]
    text = value
    if found[0] == "turns":
        text = value[0] if isinstance(value, list) and value else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{origin}: {_EXPECTED}, got {found[0]}={shown(repr(value))}")
    return text
