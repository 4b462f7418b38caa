"""Every key of a run's configuration, read off the dataclasses of `conf.schema`, or of another schema.

One list serves the command line's help, the check of unknown keys and the text of type errors, so that
the three cannot disagree with the schema or with one another.
"""

from __future__ import annotations

import ast
import inspect
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from conf.schema import RunConfig

GROUPS = ("conf", "model", "placement", "speculation")
"""The configuration groups: `GROUP=NAME` chooses the file `conf/GROUP/NAME.yaml`."""

_CHOSEN_BY_GROUP = ("model.name", "placement.name")
"""Fields that tell which file of a group was chosen; `model=NAME` sets them, nobody else may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key that may be given as `name=value`."""

    name: str
    """Dotted, such as `speculation.depth`."""
    expects: str
    """What a value must be, in words."""
    default: str
    """The schema's default as it would be typed; a named run may choose another."""
    description: str
    """The docstring of the field, in one line; may be empty."""


def all_keys() -> dict[str, Key]:
    """Every key of a run that a user may set, by name, in the order of the schema."""
    return keys_of(RunConfig)


@cache
def keys_of(schema: type) -> dict[str, Key]:
    """Every key of a dataclass that a user may set, by name, in its order; nested ones with a dot."""
    return {key.name: key for key in _keys_of(schema, prefix="")}


def _keys_of(schema: type, *, prefix: str) -> list[Key]:
    annotations = typing.get_type_hints(schema)
    docstrings = _field_docstrings(schema)
    keys: list[Key] = []
    for field in fields(schema):
        name = prefix + field.name
        annotation = annotations[field.name]
        if is_dataclass(annotation):
            assert isinstance(annotation, type)
            keys.extend(_keys_of(annotation, prefix=name + "."))
        elif name not in _CHOSEN_BY_GROUP:
            default = field.default if field.default is not MISSING else None
            if field.default_factory is not MISSING:
                default = field.default_factory()
            keys.append(
                Key(
                    name=name,
                    expects=_in_words(annotation),
                    default=_as_typed(default),
                    description=docstrings.get(field.name, ""),
                )
            )
    return keys


def _field_docstrings(schema: type) -> dict[str, str]:
    """The string literals that stand below the fields of a dataclass, by field name, each in one line."""
    (definition,) = ast.parse(inspect.getsource(schema)).body
    assert isinstance(definition, ast.ClassDef)
    docstrings: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docstrings[statement.target.id] = " ".join(following.value.value.split())
    return docstrings


def _in_words(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType):
        inner = [_in_words(part) for part in typing.get_args(annotation) if part is not types.NoneType]
        return " or ".join([*inner, "null"])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(member.name for member in annotation)
    if typing.get_origin(annotation) is list and annotation not in (list[int], list[float]):
        (inner_type,) = typing.get_args(annotation)
        return f"a list, each {_in_words(inner_type)}"
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list[int]: "a list of whole numbers such as [4,2,1]",
        dict[int, float]: "token ids with numbers such as {198:-100,42:1.5}",
        list[float]: "a list of numbers such as [15,20.5]",
    }
    return words[annotation]


def _as_typed(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(_as_typed(part) for part in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_as_typed(key)}:{_as_typed(part)}' for key, part in value.items())}}}"
    return str(value)
