"""Whether Saguaro sampling has an effect in a run: the draft that draws and the predictor must agree."""

from __future__ import annotations

from conf.schema import SpeculationConfig, Verification


def active_saguaro_c(speculation: SpeculationConfig) -> float | None:
    """C, or None where it has no effect: nothing is drawn by chance, or no outcomes are prepared."""
    is_drawn = speculation.verification is Verification.rejection and speculation.tree.nodes is None
    return speculation.saguaro_c if is_drawn and speculation.prepare_outcomes else None
