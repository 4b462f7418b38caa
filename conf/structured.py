"""The rules of structured outputs that configuration and requests share."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence

from conf.errors import shown
from conf.limits import MAX_CHOICES, MAX_GRAMMAR


def fault_of_structured(
    *,
    json: str | None,
    json_object: bool,
    regex: str | None,
    choice: Sequence[str],
    grammar: str | None,
    disable_any_whitespace: bool,
) -> str | None:
    """What is wrong with the option, or None; nothing is wrong with none of them."""
    texts = {"json": json, "regex": regex, "grammar": grammar}
    given = [name for name, text in texts.items() if text is not None]
    given += ["json_object"] * json_object + ["choice"] * bool(choice)
    if len(given) > 1:
        return f"expected one of {', '.join(given)}; leave the others out"
    for name, text in [*texts.items(), *(("choice", text) for text in choice)]:
        if text is not None and not 1 <= len(text) <= MAX_GRAMMAR:
            return f"{name}: expected 1 to {MAX_GRAMMAR} characters, got {len(text)}"
    if len(choice) > MAX_CHOICES:
        return f"choice: expected at most {MAX_CHOICES} texts, got {len(choice)}"
    if disable_any_whitespace and not {"json", "json_object"} & set(given):
        return "disable_any_whitespace is about JSON: expected json or json_object beside it; leave it out"
    if json is None:
        return None
    try:
        schema = json_text.loads(json)
    except (ValueError, RecursionError) as error:
        return f"json: expected a JSON schema, got {shown(json)} ({error})"
    if not isinstance(schema, dict | bool):
        return f"json: expected a JSON schema, which is an object, got {shown(json)}"
    return None
