"""A command as a report may show it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path


def shown_command(tool: str, arguments: Sequence[str], *, path_keys: Collection[str]) -> str:
    """`python -m tools.TOOL ...` without the folders of whoever ran it.

    path_keys: those whose values are paths, or several with commas between them.
    """
    shown = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in path_keys:
            argument = f"{key}={','.join(map(name_of, value.split(',')))}"
        shown.append(argument)
    return f"python -m tools.{tool} {shlex.join(shown)}"


def name_of(path: str) -> str:
    """Of a file or folder, also of one that is yet to be made; a model's id stays as it is."""
    one = Path(path)
    return one.name if one.is_absolute() or one.exists() else path
