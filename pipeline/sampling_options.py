"""Makes the `Sampling` of a request out of a run's keys, and out of options that a user names.

What is not supported is refused by name: an option that is ignored would change answers silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from conf.schema import RunConfig
from pipeline.errors import RequestError, shown
from pipeline.messages import Sampling

_FIELDS = Sampling.__struct_fields__


def sampling_of(config: RunConfig, *, seed: int) -> Sampling:
    """The options of a run's keys."""
    return Sampling(**{name: getattr(config, name) for name in _FIELDS if name != "seed"}, seed=seed)


def check_sampling(sampling: Sampling) -> None:
    """Raise `RequestError` for an option out of range: constructors of messages check nothing."""
    try:
        msgspec.convert(msgspec.to_builtins(sampling), Sampling)
    except msgspec.ValidationError as error:
        raise RequestError(_in_our_words(error)) from None


def with_options(base: Sampling, options: Mapping[str, object]) -> Sampling:
    """`base` with some options replaced.

    options: by name, as JSON has them: the keys of `logit_bias` may be texts.
    Raises `RequestError` for an unknown name, a wrong type and a value out of range.
    """
    for name in options:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"supported: {', '.join(_FIELDS)}"
            raise RequestError(f"option {shown(name)} is not supported; {advice}")
    try:
        changed = msgspec.convert({**msgspec.to_builtins(base), **options}, Sampling, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(_in_our_words(error)) from None
    check_sampling(changed)
    return changed


def _in_our_words(error: msgspec.ValidationError) -> str:
    """`msgspec` says what it expected `at $.presence_penalty`; the option comes first here."""
    expected, _, place = str(error).partition(" - at ")
    option = place.strip("`").partition("$.")[2] or "options"
    return f"{option}: {expected[:1].lower()}{expected[1:]}"
