"""Rates with their errors, the store of finished cells, and the report, on counts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import FanOut, RunConfig
from pipeline.errors import ConfigError
from tools.bench.prompts import PromptText
from tools.predict.cells import AnswerCounts, Cell, CellKey
from tools.predict.curves import curves_of
from tools.predict.figures import Rate, difference_of, figures_of, planned_counts, rate_of
from tools.predict.report import markdown
from tools.predict.settings import compose_study
from tools.predict.store import FILE_NAME, CellStore
from tools.predict.study import Plan


def _answer(index: int, hits: int, misses: int, *, token_ids: list[int] | None = None) -> AnswerCounts:
    return AnswerCounts(
        index=index,
        token_ids=token_ids or [1, 2, 3, 4],
        num_rounds=2,
        hits=hits,
        misses=misses,
        ready_tokens=3 * hits,
        rank_counts=[hits, misses, 0, 1],
        planned={policy.value: hits + number for number, policy in enumerate(FanOut)},
    )


def _cell(policy: str, *answers: AnswerCounts, set_name: str = "a") -> Cell:
    key = CellKey(system="saguaro", budget=3, temperature=0.0, policy=policy, set_name=set_name)
    return Cell(key=key, answers=list(answers))


def test_the_error_of_a_rate_is_that_of_equal_prompts_when_they_are_equal() -> None:
    """Four prompts of 10 outcomes with rates 0.2 0.4 0.6 0.8: the plain standard error of their mean."""
    rate = rate_of([(2, 10), (4, 10), (6, 10), (8, 10)])
    assert rate is not None
    assert rate.value == pytest.approx(0.5)
    assert rate.error == pytest.approx(0.2581989 / 2)


def test_prompts_that_only_differ_from_one_another_leave_no_error_in_a_difference() -> None:
    counts, others = [(2, 10), (9, 10)], [(1, 10), (8, 10)]
    difference = difference_of(counts, others)
    assert difference is not None
    assert (difference.value, difference.error) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-12))


def test_undefined_figures_are_none() -> None:
    assert rate_of([(0, 0)]) is None
    assert difference_of([(0, 0)], [(1, 2)]) is None
    assert rate_of([(1, 2)]) == Rate(value=0.5, error=None)
    figures = figures_of([_cell("uniform", _answer(0, 0, 5))])
    assert (figures.hit_rate, figures.ready_length) == (Rate(value=0.0, error=None), None)


def test_figures_pool_all_answers() -> None:
    cells = [_cell("uniform", _answer(0, 1, 3)), _cell("uniform", _answer(0, 2, 2), set_name="b")]
    figures = figures_of(cells, compared_with=cells)
    assert (figures.num_answers, figures.num_outcomes) == (2, 8)
    assert figures.hit_rate is not None
    assert figures.gain is not None
    assert (figures.hit_rate.value, figures.gain.value) == (3 / 8, 0.0)
    assert (figures.ready_length, figures.acceptance_length) == (3.0, 2.0)


def test_planned_outcomes_are_pooled_by_prompt_over_the_policies_that_ran() -> None:
    cells = [_cell("uniform", _answer(0, 1, 3)), _cell("calibrated", _answer(0, 2, 2))]
    assert planned_counts(cells, "uniform") == [(3, 10)]
    assert planned_counts(cells, "calibrated") == [(7, 10)]


def test_a_store_goes_on_where_it_was_and_refuses_another_study(tmp_path: Path) -> None:
    cell = _cell("uniform", _answer(0, 1, 3))
    CellStore(tmp_path, {"seed": 1, "cores": (0, 1)}).add(cell)
    assert CellStore(tmp_path, {"seed": 1, "cores": (0, 1)}).cells == {cell.key: cell}
    with pytest.raises(ConfigError, match="other: seed"):
        CellStore(tmp_path, {"seed": 2, "cores": (0, 1)})
    (tmp_path / FILE_NAME).write_text('{"figures": []}')
    with pytest.raises(ConfigError, match="not written by this tool"):
        CellStore(tmp_path, {"seed": 1})


def test_the_report_has_a_row_for_every_policy_and_counts_equal_answers() -> None:
    study = compose_study(["out=x", "systems=saguaro", "policies=uniform,calibrated", "budgets=3"])
    study.temperatures[:] = [0.0]
    prompt = PromptText(set_name="a", index=0, text="?", origin="a:1")
    plan = Plan(study=study, systems={"saguaro": RunConfig()}, prompts={"a": [prompt]})
    cells = [
        _cell("uniform", _answer(0, 1, 3), _answer(1, 1, 3)),
        _cell("calibrated", _answer(0, 3, 1), _answer(1, 3, 1, token_ids=[1, 2, 9, 9])),
    ]
    text = markdown(plan, cells, curves_of(cells))
    assert "| 0 | uniform | 0.250 ± 0.000 | - | 3.00 | 2.00 |" in text
    assert "| 0 | calibrated | 0.750 ± 0.000 | +0.500 ± 0.000 | 3.00 | 2.00 |" in text
    assert "same in every cell: 1 of 2" in text


def test_a_curve_pools_all_cells_of_a_temperature() -> None:
    (curve,) = curves_of([_cell("uniform", _answer(0, 1, 3)), _cell("calibrated", _answer(0, 3, 1))])
    assert curve.num_outcomes == 10
    assert curve.miss_rates.tolist() == [0.6, 0.2, 0.2]
