"""Typed reading of a model's JSON settings: each key is what it must be, or one error says what it is.

Model files are a stranger's. What is read here wrongly would otherwise fail as a `TypeError` somewhere in
the decoder. Knows nothing about which keys there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, shown

_MOST_NUMBER = 1e30
"""Above any setting, and below what a float cannot hold."""


class ConfigFields:
    """One JSON object. A key that is null counts as absent, as it does to transformers."""

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        """where: how errors name the object, such as `FOLDER: config.json`."""
        self.values = values
        self.where = where

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        """A whole number from `least` to `most`. Raises `ConfigError`, also when absent without default."""
        value: Any = self.values.get(key)
        if value is None:
            value = default
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < least or (most is not None and value > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise self.refusal(key, f"a whole number {bounds}")
        return int(value)

    def number(self, key: str, default: float | None = None, *, may_be_zero: bool = False) -> float:
        """A positive finite number. Raises `ConfigError`, also when absent without default."""
        value: Any = self.values.get(key)
        if value is None:
            value = default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < _MOST_NUMBER or (value == 0 and not may_be_zero):
            raise self.refusal(key, "a number of at least 0" if may_be_zero else "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false when absent. Raises `ConfigError`."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return bool(value)

    def section(self, key: str) -> Mapping[str, Any]:
        """An object; an empty one when absent. Raises `ConfigError`."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "an object")
        return value or {}

    def refusal(self, key: str, expected: str) -> ConfigError:
        """The error for a key that is not what it must be."""
        came = shown(repr(self.values.get(key)))
        return ConfigError(f"{self.where} has {key}={came}, expected {expected}; correct the file")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ConfigError` if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON: {error}, expected an object; fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected a JSON object; fetch it again")
    return content
