"""The rules for emulated models: `model.emulated.*`, and what goes together with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from conf.errors import ConfigError
from conf.limits import MAX_WHOLE_NUMBER
from conf.schema import CpuKernels, DraftKind, EmulatedConfig, RunConfig, WeightFormat

LEAST_VOCABULARY = 512
"""256 bytes and as many words; the laws of a row name 128 candidates."""
MOST_VOCABULARY = 2**18
_MOST_MS = 3.6e6


def check_emulated(config: RunConfig) -> None:
    """Raise `ConfigError` for the first rule that is broken; keys of `emulated` need an emulated model."""
    model = config.model
    if not model.is_emulated:
        if model.emulated != EmulatedConfig():
            raise ConfigError(
                f"model.emulated: expected model=emulated or one of its kind beside it, and the run has "
                f"model={model.name}; choose such a model or leave the keys out"
            )
        return
    if model.path is not None:
        raise ConfigError(
            f"model.path={model.path}: expected none, because model={model.name} has no files; leave it out"
        )
    for key, value, default in (
        ("weights", model.weights, WeightFormat.dtype),
        ("cpu_kernels", model.cpu_kernels, CpuKernels.auto),
    ):
        if value is not default:
            raise ConfigError(
                f"model.{key}={value.name}: expected {default.name}, because model={model.name} has no "
                "matrices; leave it out"
            )
    draft = config.speculation.draft
    if draft.kind in (DraftKind.layers, DraftKind.model):
        key = "layers" if draft.kind is DraftKind.layers else "path"
        raise ConfigError(
            f"speculation.draft.{key}: expected speculation.draft.kind=auto, ngram or none, because "
            f"model={model.name} emulates its draft too; leave it out"
        )
    _check_law(model.emulated)
    _check_table("target", model.emulated.target_rows, model.emulated.target_ms)
    _check_table("draft", model.emulated.draft_rows, model.emulated.draft_ms)


def _check_law(emulated: EmulatedConfig) -> None:
    least_acceptance = 0.05
    for name, least, most in (
        ("easy_acceptance", least_acceptance, 1.0),
        ("hard_acceptance", least_acceptance, 1.0),
        ("easy_share", 0.0, 1.0),
        ("easy_stretch", 1.0, 1e9),
        ("spread", 0.0, 3.0),
        ("draft_error", 0.01, 100.0),
        ("draft_blindness", 0.0, 1.0),
        ("time_scale", 0.0, 1000.0),
        ("vocab_size", LEAST_VOCABULARY, MOST_VOCABULARY),
        ("seed", 0, MAX_WHOLE_NUMBER),
    ):
        value = getattr(emulated, name)
        if not least <= value <= most:  # which NaN is not either
            advice = "lower it" if value > most else "raise it"
            raise ConfigError(f"model.emulated.{name}={value}: expected {least} to {most}; {advice}")
    share = emulated.easy_share
    if 0 < share < 1 and emulated.easy_stretch * (1 - share) / share < 1:
        raise ConfigError(
            f"model.emulated.easy_stretch={emulated.easy_stretch}: expected at least "
            f"{share / (1 - share):.3g}, because hard stretches would be shorter than a token at "
            f"easy_share={share}; raise it or lower easy_share"
        )


def _check_table(side: str, rows: Sequence[int], times_ms: Sequence[float]) -> None:
    key_rows, key_ms = f"model.emulated.{side}_rows", f"model.emulated.{side}_ms"
    if len(rows) != len(times_ms) or not rows:
        raise ConfigError(
            f"{key_ms}={_shown(times_ms)}: expected as many times as {key_rows}={_shown(rows)} has entries, "
            "at least one; give both lists"
        )
    if rows[0] < 1 or any(after <= before for before, after in itertools.pairwise(rows)):
        raise ConfigError(f"{key_rows}={_shown(rows)}: expected ascending numbers of at least 1; sort them")
    is_finite = all(math.isfinite(time) and 0 <= time <= _MOST_MS for time in times_ms)
    if not is_finite or any(after < before for before, after in itertools.pairwise(times_ms)):
        raise ConfigError(
            f"{key_ms}={_shown(times_ms)}: expected times from 0 to {_MOST_MS:.0f} ms that do not fall, "
            "because more tokens never take less; correct them"
        )


def _shown(values: Sequence[float]) -> str:
    return str(list(values)).replace(" ", "")
