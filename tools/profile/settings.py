"""The keys of `python -m tools.profile` that are not keys of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.keys import keys_of
from conf.schema_file import compose_schema, parse_arguments
from pipeline.errors import ConfigError, shown_path
from pipeline.spans import DEFAULT_NUM_SPANS, MAX_NUM_SPANS

_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "profile"
_MAX_SECONDS = 1_000_000
_VERBATIM_KEYS = ("out", "picture", "attach")
"""Values taken as they stand: they hold what Hydra's grammar gives a meaning to."""


@dataclass
class ProfileSettings:
    """All keys."""

    out: str = "profile"
    """Folder for trace.json, summary.md, summary.json and rounds.png; what it has of these is replaced."""
    picture: str | None = None
    """File for the picture of the rounds. Null: rounds.png in OUT."""
    rounds: int = 6
    """Rounds in the picture."""
    first_round: int | None = None
    """First round in the picture, counted over the whole profile from 0. Null: so as to show the middle."""
    num_spans: int = DEFAULT_NUM_SPANS
    """Size of the ring: how many spans each stage keeps, the latest. 40 bytes each."""
    torch_profiler: bool = False
    """Also trace PyTorch's operators and kernels inside target and draft, which slows both down."""
    cost_pairs: int | None = None
    """Instead of a profile: print what recording costs, from so many pairs of answers with it and without."""
    attach: str | None = None
    """Profile an engine that runs already: the pid of the process that started it, its run directory, or
    `any` where there is just one. Then no key of a run may be given."""
    seconds: float = 5.0
    """With `attach`: how long to record."""


def split_settings(arguments: Sequence[str]) -> tuple[ProfileSettings, list[str]]:
    """The tool's own settings, and the arguments that are left for the run. Raises `ConfigError`."""
    known = keys_of(ProfileSettings)
    own = [argument for argument in arguments if argument.partition("=")[0] in known]
    rest = [argument for argument in arguments if argument not in own]
    given = parse_arguments(own, example="out=profile")
    verbatim = {key: given.pop(key) for key in _VERBATIM_KEYS if key in given}
    settings = compose_schema(ProfileSettings, folder=_FOLDER, file="config", given=given)
    for key, value in verbatim.items():
        if not value.strip():
            raise ConfigError(f"{key}= is empty; give it a value or leave it out")
        is_null = value == "null" and getattr(settings, key) is None
        setattr(settings, key, None if is_null else value)
    _check(settings, rest)
    return settings, rest


def _check(settings: ProfileSettings, rest: Sequence[str]) -> None:
    if settings.rounds < 1:
        raise ConfigError(f"rounds={settings.rounds}: expected at least 1")
    if settings.first_round is not None and settings.first_round < 0:
        raise ConfigError(f"first_round={settings.first_round}: expected at least 0")
    if not 1 <= settings.num_spans <= MAX_NUM_SPANS:
        raise ConfigError(f"num_spans={settings.num_spans}: expected 1 to {MAX_NUM_SPANS}")
    if settings.cost_pairs is not None and settings.cost_pairs < 1:
        raise ConfigError(f"cost_pairs={settings.cost_pairs}: expected at least 1")
    if not 0 < settings.seconds <= _MAX_SECONDS:
        raise ConfigError(
            f"seconds={settings.seconds}: expected a positive number of seconds, at most {_MAX_SECONDS}"
        )
    if Path(settings.out).is_file():
        raise ConfigError(f"out={shown_path(settings.out)} is a file, expected a folder; choose another")
    if settings.picture is not None and Path(settings.picture).suffix != ".png":
        raise ConfigError(f"picture={shown_path(settings.picture)}: expected a name that ends with .png")
    if settings.picture is not None and Path(settings.picture).is_dir():
        raise ConfigError(
            f"picture={shown_path(settings.picture)} is a folder, expected a file; choose another name"
        )
    if settings.attach is not None and rest:
        raise ConfigError(
            f"attach and {shown_path(rest[0])} are both given: an engine that runs has its configuration; "
            "leave one out"
        )
