"""Sampling options by name, as programs give them: checked against `Sampling`, and completed by defaults.

Whatever fields `Sampling` has are options; nothing here lists them.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Iterable, Mapping

import msgspec

from pipeline.errors import RequestError, shown
from pipeline.messages import Sampling

_SEED_BITS = 53
"""Fresh seeds stay exact in every JSON reader, which may read numbers as doubles."""


def fresh_seed() -> int:
    """A seed for a request that was given none."""
    return secrets.randbits(_SEED_BITS)


def check_option_names(names: Iterable[str]) -> None:
    """Raise `RequestError` for the first name that is no field of `Sampling`."""
    known = Sampling.__struct_fields__
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"supported: {', '.join(known)}"
            raise RequestError(f"{shown(name)}: there is no such sampling option; {advice}")


def resolve_options(options: Mapping[str, object], defaults: Mapping[str, object]) -> Sampling:
    """`defaults` with `options` in their places, and a fresh seed where neither gives one; None is no option.

    Raises `RequestError` that names the option that does not exist, or is out of its range.
    """
    check_option_names(options)
    merged = {**defaults, **{name: value for name, value in options.items() if value is not None}}
    if merged.get("seed") is None:
        merged["seed"] = fresh_seed()
    try:
        return msgspec.convert(merged, Sampling)
    except (msgspec.ValidationError, RecursionError) as error:
        name = _name_in(str(error))
        raise RequestError(f"{name}={shown(merged.get(name))}: {_without_path(str(error))}") from None


def _name_in(reason: str) -> str:
    """The option of a message such as ``Expected `float` <= 1.0 - at `$.top_p` ``."""
    return reason.rpartition("`$.")[2].split("`")[0].split("[")[0].split(".")[0]


def _without_path(reason: str) -> str:
    return reason.rpartition(" - at ")[0].replace("Expected", "expected", 1) or reason
