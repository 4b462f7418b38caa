"""The keys of `python -m tools.predict`: its own, and those of the engine that it does not vary itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from conf.keys import GROUPS, all_keys
from conf.limits import MAX_BUDGET, MAX_SEED, MAX_TEMPERATURE
from conf.schema import FanOut
from conf.schema_file import check_known, compose_schema, parse_arguments
from pipeline.errors import ConfigError, shown, shown_path

_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "predict"
_VERBATIM_KEYS = ("out", "systems", "policies", "budgets", "temperatures", "prompts")
"""Values taken as they stand: they hold what Hydra's grammar gives a meaning to."""
_VARIED = {
    "conf": "systems",
    "speculation.fan_out": "policies",
    "speculation.budget": "budgets",
    "temperature": "temperatures",
}
"""Keys of the engine that the tool sets, and its own keys for them."""
_FIXED = ("max_requests", "chat", "n")

T = TypeVar("T")


@dataclass
class PredictSettings:
    """All keys of the tool's own."""

    out: str = ""
    """Needed: the folder of results.json, table.md and miss_rates.png. The same command goes on there."""
    systems: str = "saguaro,saguaro_tree"
    """Comma-separated entries NAME or LABEL=NAME, each with any number of +key=value; runs that prepare
    outcomes."""
    policies: str = "uniform,geometric,calibrated"
    """Comma-separated values of speculation.fan_out; the first one is what the others are compared with."""
    budgets: str = "24"
    """Comma-separated values of speculation.budget."""
    temperatures: str = "0,0.7,1"
    """Comma-separated; 0 is greedy."""

    prompts: str | None = None
    """Comma-separated .jsonl files, a set each, as tools.bench takes them. Null: the tools' own set."""
    num_prompts: int | None = None
    """First so many of each set. Null: all."""
    max_tokens: int = 64
    """Most tokens of an answer."""
    seed: int = 1
    """Of the first prompt of each set; the next ones count on."""
    threads: int = 1
    """Of the forwards. No figure depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is compared: the settings, read."""

    settings: PredictSettings
    policies: list[FanOut]
    budgets: list[int]
    temperatures: list[float]
    engine_arguments: list[str]
    """`key=value` for every system."""


def compose_study(arguments: Sequence[str]) -> Study:
    """Compose `key=value` arguments. Raises `ConfigError`."""
    given = parse_arguments(arguments, example="max_tokens=64")
    engine_arguments = _take_engine_arguments(given)
    check_known(given, PredictSettings)
    verbatim = {key: given.pop(key) for key in _VERBATIM_KEYS if key in given}
    settings = compose_schema(PredictSettings, folder=_FOLDER, file="config", given=given)
    for key, value in verbatim.items():
        if not value.strip():
            raise ConfigError(f"{key}= is empty; give it a value or leave it out")
        setattr(settings, key, None if (key, value) == ("prompts", "null") else value)
    _check(settings)
    return Study(
        settings=settings,
        policies=_listed("policies", settings.policies, _policy, f"some of {', '.join(FanOut.__members__)}"),
        budgets=_listed("budgets", settings.budgets, _budget, f"whole numbers from 1 to {MAX_BUDGET}"),
        temperatures=_listed(
            "temperatures", settings.temperatures, _temperature, f"numbers from 0 to {MAX_TEMPERATURE}"
        ),
        engine_arguments=engine_arguments,
    )


def _take_engine_arguments(given: dict[str, str]) -> list[str]:
    """Take the engine's keys out of `given`."""
    own = set(PredictSettings.__dataclass_fields__)
    known = {*all_keys(), *GROUPS} - own
    found = [key for key in given if key in known]
    for key in found:
        if key in _VARIED:
            raise ConfigError(f"{key}={shown(given[key])}: this key follows from {_VARIED[key]}=; give that")
        if key in _FIXED:
            raise ConfigError(f"{key}={shown(given[key])}: requests come one by one here; leave it out")
    return [f"{key}={given.pop(key)}" for key in found]


def _check(settings: PredictSettings) -> None:
    if not settings.out:
        raise ConfigError("out is missing: expected out=FOLDER")
    if Path(settings.out).is_file():
        raise ConfigError(f"out={shown_path(settings.out)} is a file, expected a folder; choose another")
    for key in ("num_prompts", "max_tokens", "threads"):
        value = getattr(settings, key)
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value}: expected at least 1; raise it")
    if not 0 <= settings.seed <= MAX_SEED // 2:
        raise ConfigError(f"seed={settings.seed}: expected 0 to {MAX_SEED // 2}")


def _listed(key: str, text: str, read: Callable[[str], T], expects: str) -> list[T]:
    values: list[T] = []
    for part in text.split(","):
        try:
            value = read(part.strip())
        except (ValueError, KeyError):
            raise ConfigError(f"{key}={shown(text)}: expected {expects}, got {shown(repr(part))}") from None
        if value in values:
            raise ConfigError(f"{key}={shown(text)}: {shown(part)} comes twice; leave one out")
        values.append(value)
    return values


def _policy(text: str) -> FanOut:
    return FanOut[text]


def _budget(text: str) -> int:
    if not 1 <= (value := int(text)) <= MAX_BUDGET:
        raise ValueError
    return value


def _temperature(text: str) -> float:
    if not 0 <= (value := float(text)) <= MAX_TEMPERATURE:  # which NaN is not either
        raise ValueError
    return value
