"""An emulated model in real processes: same tokens, and rounds that last what the tables say."""

from __future__ import annotations

import pytest

from conf.check import check
from conf.compose import compose
from pipeline.model_source import resolve_models
from tools.figures.engine_run import Measured, measure

TIMES = [
    "model.emulated.target_rows=[1]",
    "model.emulated.target_ms=[30]",
    "model.emulated.draft_rows=[1]",
    "model.emulated.draft_ms=[4]",
]


def run(*arguments: str, temperature: float = 0.0) -> Measured:
    config = compose(["model=emulated", *TIMES, "speculation.min_path_prob=0", *arguments])
    check(config)
    return measure(resolve_models(config), num_groups=1, max_tokens=60, temperature=temperature, first_seed=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processes_agree_and_take_the_time_of_the_tables(temperature):
    plain = run("conf=autoregressive", temperature=temperature)
    linear = run("conf=speculative", "speculation.depth=5", temperature=temperature)
    ahead = run("conf=ssd", "speculation.depth=5", "speculation.budget=18", temperature=temperature)
    assert linear.token_ids == plain.token_ids
    assert ahead.token_ids == plain.token_ids
    for measured in (plain, linear, ahead):
        assert measured.per_round("target_compute_ms") >= 30.0
    # Drafting again takes five steps of 4 ms, and the target waits for them.
    assert linear.per_round("target_wait_ms") >= 20.0
    # Prepared ahead, the five steps and the glue step fit into the 30 ms; a busy machine may make them late.
    assert ahead.hit_rate > 0.3
    assert ahead.per_round("overlap_ms") > 5.0
    assert sum(len(lengths) for lengths in ahead.tokens_by_source.values()) > 0
