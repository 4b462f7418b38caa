"""The miss rate against the fan-out, and the power law through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.outcome_predictor.power_law import PowerLaw, fit_power_law, miss_rates
from tools.predict.cells import Cell, total_rank_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Of one system at one temperature, all sets and policies of its largest budget together."""

    system: str
    temperature: float
    num_outcomes: int
    miss_rates: NDArray[np.float64]
    """[F]: share of bonus tokens that are not among the 1, 2, ... likeliest at their node."""
    law: PowerLaw


def curves_of(cells: Sequence[Cell]) -> list[Curve]:
    """One for each system and temperature, in the order of the cells; those without outcomes left out."""
    curves: list[Curve] = []
    groups = dict.fromkeys((cell.key.system, cell.key.temperature) for cell in cells)
    for system, temperature in groups:
        group = [c for c in cells if (c.key.system, c.key.temperature) == (system, temperature)]
        budget = max(cell.key.budget for cell in group)
        counts = total_rank_counts([cell for cell in group if cell.key.budget == budget])
        if counts.sum() > 0:
            curves.append(
                Curve(
                    system=system,
                    temperature=temperature,
                    num_outcomes=int(counts.sum()),
                    miss_rates=miss_rates(counts),
                    law=fit_power_law(counts),
                )
            )
    return curves
