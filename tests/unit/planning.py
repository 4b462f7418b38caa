"""Figures for the planner, by hand. Times are in ms here."""

from __future__ import annotations

import random

from conf.schema import SpeculationConfig, TreeConfig
from stages.draft_speculator.growth import Shape
from stages.draft_speculator.measures import Measures, Way
from stages.draft_speculator.planner import OnlinePlanner
from stages.draft_speculator.time_model import TimeModel

MS = 1e6


def time_model(base: float, slope: float, *, rows: range = range(1, 12), noise: float = 0.0) -> TimeModel:
    draw, model = random.Random(3), TimeModel()
    for _ in range(20):
        for n in rows:
            model.add(n, (base + slope * n) * MS * (1 + noise * draw.uniform(-1, 1)))
    return model


def measured(
    *, step: float = 3.0, row: float = 0.5, tokens: int = 2, round_ms: float = 25.0, rounds: int = 40
) -> Measures:
    """A target that takes 20 ms and `row` for each row, a draft that takes `step`, `tokens` a round."""
    measures = Measures()
    measures.target = time_model(20, row)
    measures.step = time_model(step, 0.1)
    for _ in range(rounds):
        measures.add_round(tokens=tokens, ns=round_ms * MS, way=Way.PREPARED)
        if tokens == 1:
            measures.add_continuation(was_accepted=False)
    return measures


def online_planner(measures: Measures, **tree: int) -> OnlinePlanner:
    shape = Shape.of(SpeculationConfig(depth=6, tree=TreeConfig(**tree)))
    return OnlinePlanner(shape, measures, min_path_prob=0.2, budget=24)
