"""The options of a request as a program gives them: what is left out is as the engine was started with."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping

from conf.schema import RunConfig
from pipeline.errors import RequestError, shown
from pipeline.messages import Sampling
from pipeline.sampling_options import sampling_of, with_options

_SEED_BITS = 53
"""Fresh seeds stay exact in every JSON reader, which may read numbers as doubles."""


def without_defaults(options: Mapping[str, object]) -> dict[str, object]:
    """The options that say something: None does not. A single stop string may stand for a list of it."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return given


def resolve_options(options: Mapping[str, object], config: RunConfig) -> Sampling:
    """The options of a run with these in their places, and a fresh seed where neither gives one.

    Raises `RequestError` that names the option that is not supported or out of range.
    """
    seed = secrets.randbits(_SEED_BITS) if config.seed is None else config.seed
    return with_options(sampling_of(config, seed=seed), without_defaults(options))


def check_limit(name: str, limit_s: float | None) -> None:
    """Raise `RequestError` for what is no limit."""
    if limit_s is None:
        return
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
        raise RequestError(f"{name}={shown(repr(limit_s))}: expected a number of seconds above 0; correct it")
