"""The keys of `python -m tools.figures`, and the rules that they must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from conf.limits import MAX_BUDGET, MAX_DEPTH, MAX_TEMPERATURE
from conf.schema_file import check_known, compose_schema, parse_arguments
from pipeline.errors import ConfigError, shown_path

_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "figures"
_VERBATIM_KEYS = ("out", "model")


class FigureName(str, Enum):
    """What to measure and draw."""

    fan_out = "fan_out"
    """Hit rate against fan-out, with the fitted power law."""
    policies = "policies"
    """Hit rate against budget: uniform, geometric, calibrated."""
    saguaro_c = "saguaro_c"
    """Hit rate against accepted tokens under the rejection rule, as Saguaro sampling's C falls."""
    backup = "backup"
    """Drafting again against look-up after a miss, by batch size."""
    theorem7 = "theorem7"
    """Speed-up against what Theorem 7 makes of the run's own hit rate and times."""
    throughput = "throughput"
    """Throughput against latency by batch size, and tokens/s beside the published ones."""
    overhead = "overhead"
    """What a round takes beyond the forwards, for a slow and a fast target."""


TIMED = (FigureName.backup, FigureName.theorem7, FigureName.throughput, FigureName.overhead)
"""Figures about time: they need real processes, and an emulated model."""


@dataclass
class FigureSettings:
    """All keys."""

    figure: FigureName | None = None
    """Needed: what to measure and draw."""
    out: str = ""
    """Needed: the folder of FIGURE.png and FIGURE.md."""
    model: str = "emulated_llama3_70b"
    """A file of the model group: an emulated model, or demo for fan_out, policies and saguaro_c."""
    depth: int = 7
    """K: tokens in a drafted chain."""
    fan_out: int = 3
    """F: outcomes prepared after each number of accepted tokens; the budget is F * (K + 1)."""
    depths: list[int] = field(default_factory=lambda: [2, 4, 7])
    """Of the sweep of theorem7."""
    fan_outs: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6, 8])
    """Of fan_out, policies and saguaro_c; theorem7 sweeps the first and the third."""
    saguaro_cs: list[float] = field(default_factory=lambda: [1.0, 0.7, 0.5, 0.3, 0.1, 0.0])
    """C of Saguaro sampling, of the figure of that name."""
    acceptances: list[float] = field(default_factory=lambda: [0.5, 0.9])
    """Of the sweep of theorem7: hard_acceptance of the model."""
    batches: list[int] = field(default_factory=lambda: [1, 4, 16])
    """Requests that share a round, of throughput and backup."""
    num_prompts: int = 4
    """Answers for each point; of throughput and backup groups of the largest batch, at every batch size."""
    max_tokens: int = 200
    """Tokens of an answer."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 1
    """Of the first prompt; the next ones count on."""
    time_scale: float = 1.0
    """All emulated times are multiplied by it. On a busy machine 4 keeps what others use of it out of the
    ratios; the pipeline's own share shrinks likewise."""


def compose_settings(arguments: Sequence[str]) -> FigureSettings:
    """Compose `key=value` arguments. Raises `ConfigError`."""
    given = parse_arguments(arguments, example="figure=fan_out")
    check_known(given, FigureSettings)
    verbatim = {key: given.pop(key) for key in _VERBATIM_KEYS if key in given}
    settings = compose_schema(FigureSettings, folder=_FOLDER, file="config", given=given)
    for key, value in verbatim.items():
        setattr(settings, key, value)
    _check(settings)
    return settings


def _check(settings: FigureSettings) -> None:
    if settings.figure is None:
        raise ConfigError(
            f"figure is missing: expected figure=NAME, one of {', '.join(name.value for name in FigureName)}"
        )
    if not settings.out.strip():
        raise ConfigError("out is missing: expected out=FOLDER")
    if Path(settings.out).is_file():
        raise ConfigError(f"out={shown_path(settings.out)} is a file, expected a folder; choose another")
    if settings.figure in TIMED and not settings.model.startswith("emulated"):
        raise ConfigError(
            f"model={settings.model}: expected an emulated model for figure={settings.figure.value}, "
            "whose times are known; choose one, or figure=fan_out, policies or saguaro_c"
        )
    if settings.figure is FigureName.saguaro_c and settings.model.startswith("emulated"):
        raise ConfigError(
            f"model={settings.model}: expected a real model for figure=saguaro_c, since an emulated one "
            "has no law to draw from; choose model=demo"
        )
    if settings.figure is FigureName.saguaro_c and not settings.temperature > 0:
        raise ConfigError(
            f"temperature={settings.temperature:g}: expected more than 0 for figure=saguaro_c, since nothing "
            "is drawn from a law at 0; add temperature=1"
        )
    ranges: dict[str, tuple[Sequence[float], float, float]] = {
        "depth": ([settings.depth], 1, MAX_DEPTH),
        "fan_out": ([settings.fan_out], 1, 64),
        "depths": (settings.depths, 1, MAX_DEPTH),
        "fan_outs": (settings.fan_outs, 1, 64),
        "saguaro_cs": (settings.saguaro_cs, 0, 1),
        "acceptances": (settings.acceptances, 0.05, 1.0),
        "batches": (settings.batches, 1, 256),
        "num_prompts": ([settings.num_prompts], 1, 100_000),
        "max_tokens": ([settings.max_tokens], 16, 100_000),
        "temperature": ([settings.temperature], 0, MAX_TEMPERATURE),
        "seed": ([settings.seed], 0, 2**40),
        "time_scale": ([settings.time_scale], 0.01, 1000),
    }
    for key, (values, least, most) in ranges.items():
        if not values or not all(least <= value <= most for value in values):
            shown = getattr(settings, key)
            raise ConfigError(f"{key}={shown}: expected {least} to {most}; change it")
    if max([settings.fan_out, *settings.fan_outs]) * (settings.depth + 1) > MAX_BUDGET:
        raise ConfigError(f"fan_outs: expected at most {MAX_BUDGET} branches, F * (depth + 1); lower some")
