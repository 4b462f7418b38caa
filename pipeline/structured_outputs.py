"""The option `structured_outputs` as programs give it, and `response_format` of the OpenAI API, made one.

A schema may be given as an object; it travels as JSON text. Whether a grammar can be compiled is for the
tokenizer stage to say.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from conf.structured import fault_of_structured
from pipeline.errors import RequestError, shown
from pipeline.messages import StructuredOutputs

_FORMATS = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must be: exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`.

    The names are vLLM's; what each means is said at `pipeline.messages.StructuredOutputs`.
    """

    json: str | Mapping[str, object] | None = None
    """A JSON schema: an object, or JSON text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        """Raises `RequestError`."""
        plain_structured_outputs(self)


def plain_structured_outputs(given: object) -> dict[str, object]:
    """The fields of `StructuredOutputs` that say something, in plain types.

    given: `StructuredOutputsParams`, or a mapping of its fields. Raises `RequestError`.
    """
    if isinstance(given, StructuredOutputsParams):
        given = asdict(given)
    if isinstance(given, StructuredOutputs):
        given = msgspec.to_builtins(given)
    if not isinstance(given, Mapping):
        raise RequestError(
            f"structured_outputs={shown(repr(given))}: expected StructuredOutputsParams, or an object with "
            "one of json, json_object, regex, choice and grammar"
        )
    plain = {str(name): value for name, value in given.items() if value not in (None, False, [], ())}
    if isinstance(plain.get("json"), Mapping | bool):
        try:
            plain["json"] = json_text.dumps(plain["json"])
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"structured_outputs.json: expected a JSON schema, got one with {error}"
            ) from None
    if isinstance(plain.get("choice"), tuple):
        plain["choice"] = list(plain["choice"])
    try:
        check_structured_outputs(msgspec.convert(plain, StructuredOutputs))
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at ")
        option = "structured_outputs" + place.strip("`").removeprefix("$")
        raise RequestError(f"{option}: {expected[:1].lower()}{expected[1:]}") from None
    return plain


def plain_response_format(given: object) -> dict[str, object] | None:
    """What `response_format` asks for, as fields of `StructuredOutputs`; None for free text.

    Raises `RequestError`.
    """
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() | str() | bool() as schema}}:
            return plain_structured_outputs({"json": schema})
    raise RequestError(f"response_format={shown(repr(given))}: expected {_FORMATS}")


def check_structured_outputs(structured: StructuredOutputs) -> None:
    """Raise `RequestError` unless exactly one thing is asked for, and a schema is JSON."""
    fields = {name: getattr(structured, name) for name in structured.__struct_fields__}
    fault = fault_of_structured(**fields)
    if fault is None and not any(value for name, value in fields.items() if name != "disable_any_whitespace"):
        fault = "expected one of json, json_object, regex, choice and grammar, got none"
    if fault is not None:
        raise RequestError(f"structured_outputs: {fault}")
