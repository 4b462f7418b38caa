"""Values of keys that Hydra's grammar would take apart: stop strings and choices, which are any text, and
biases."""

from __future__ import annotations

import json
import re

from conf.errors import ConfigError, shown

_BARE_KEY = re.compile(r"([{,]\s*)(-?\d+)(?=\s*:)")
"""A token id that stands where JSON wants a text."""


def stop_strings(value: str) -> list[str]:
    """A JSON list of texts, or one text as it stands. Raises `ConfigError`."""
    if not value.startswith("["):
        return [value]
    texts = _texts_or_none(value)
    if texts is None:
        raise ConfigError(
            f'stop={shown(value)}: expected one text, or a JSON list of texts such as ["\\n\\n", "END"]'
        )
    return texts


def choices(value: str) -> list[str]:
    """A JSON list of texts. Raises `ConfigError`."""
    texts = _texts_or_none(value)
    if texts is None:
        raise ConfigError(
            f'structured_outputs.choice={shown(value)}: expected a JSON list of texts such as ["yes", "no"]'
        )
    return texts


def logit_bias(value: str) -> dict[int, float]:
    """A JSON object from token ids, quoted or not, to numbers. Raises `ConfigError`."""
    given = _json_or_none(_BARE_KEY.sub(r'\1"\2"', value))
    try:
        if isinstance(given, dict):
            return {int(token): float(bias) for token, bias in given.items()}
    except (TypeError, ValueError, OverflowError):
        pass  # no id, or no number
    raise ConfigError(
        f"logit_bias={shown(value)}: expected token ids with numbers such as {{198:-100,42:1.5}}"
    )


def _texts_or_none(value: str) -> list[str] | None:
    texts = _json_or_none(value)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    return texts


def _json_or_none(value: str) -> object:
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return parsed
