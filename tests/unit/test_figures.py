"""`python -m tools.figures`: its arithmetic, its settings, and a small figure from end to end."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from matplotlib.figure import Figure

from conf.errors import ConfigError
from pipeline.messages import ProposalSource
from tests.fake_frontend_events import METRICS
from tools.figures.command import _FIGURES, main
from tools.figures.engine_run import Measured
from tools.figures.in_process import Rounds
from tools.figures.predictions import fit_power_law
from tools.figures.settings import FigureName, compose_settings
from tools.figures.theorem7 import DraftTimes, Theorem
from tools.figures.throughput import critical_batch, overhead_figure


def test_a_power_law_is_found_again():
    fan_outs = [1, 2, 3, 4, 8]
    scale, power = fit_power_law(fan_outs, [0.3 * fan_out**-0.7 for fan_out in fan_outs])
    assert scale == pytest.approx(0.3)
    assert power == pytest.approx(0.7)


def test_points_without_misses_are_left_out_of_the_fit():
    assert fit_power_law([1, 2, 4], [0.4, 0.2, 0.0]) == pytest.approx((0.4, 1.0))
    assert fit_power_law([1, 2], [0.4, 0.0]) is None


@pytest.mark.parametrize(
    ("verify_ms", "expected"),
    [
        (3.0, 2.0),  # the step that ends at 5 is under way
        (5.0, 0.0),
        (6.0, 2.0),
        (11.0, 0.0),  # three levels are ready at 11, and nothing is left to do
        (40.0, 0.0),
    ],
)
def test_on_a_hit_the_target_waits_for_the_step_under_way(verify_ms, expected):
    assert DraftTimes(single=2.0, branch=3.0).hit_wait(verify_ms, depth=3) == pytest.approx(expected)


def test_theorem_7_in_measured_times():
    theorem = Theorem(
        hit_rate=0.75,
        tokens_after_hit=5.0,
        tokens_after_miss=3.0,
        verify=15.0,
        hit_wait=1.0,
        backup=12.0,
        overhead=1.0,
    )
    # 4.5 tokens in 15 + 1 + 0.25 * 12 + 1 = 20 ms.
    assert theorem.tokens_per_second() == pytest.approx(225.0)


@pytest.mark.parametrize(
    ("look_up", "expected"),
    [([1.1, 0.9, 1.2], 16), ([0.9, 1.1, 1.2], 4), ([1.1, 1.1, 0.9], None), ([2.0, 2.0, 2.0], 1)],
)
def test_the_critical_batch_is_where_look_up_is_faster_from_there_on(look_up, expected):
    assert critical_batch([1, 4, 16], [1.0, 1.0, 1.0], look_up) == expected


def test_rates_without_look_ups_are_undefined():
    assert math.isnan(Rounds().hit_rate)
    assert math.isnan(Rounds().mean())
    rounds = Rounds(by_source={ProposalSource.HIT: [5, 3, 4], ProposalSource.BACKUP: [2]})
    assert rounds.hit_rate == 0.75
    assert rounds.mean(ProposalSource.HIT) == 4.0
    assert rounds.mean() == 3.5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["out=x"], "figure is missing"),
        (["figure=fan_out"], "out is missing"),
        (["figure=pie", "out=x"], "figure=pie: expected"),
        (["figure=theorem7", "out=x", "model=demo"], "model=demo: expected an emulated model"),
        (["figure=fan_out", "out=x", "fan_outs=[]"], "fan_outs=[]: expected 1 to 64"),
        (["figure=fan_out", "out=x", "max_tokens=2"], "max_tokens=2: expected 16 to"),
        (
            ["figure=fan_out", "out=x", "fan_outs=[64]", "depth=40"],
            "expected at most 1024 branches",
        ),
        (["figure=saguaro_c", "out=x", "temperature=1"], "model=emulated_llama3_70b: expected a real model"),
        (["figure=saguaro_c", "out=x", "model=demo"], "temperature=0: expected more than 0"),
        (
            ["figure=saguaro_c", "out=x", "model=demo", "temperature=1", "saguaro_cs=[2]"],
            "saguaro_cs=[2.0]: expected 0 to 1",
        ),
        (["figure=fan_out", "out=x", "colour=red"], "colour: there is no such key"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments, expected):
    with pytest.raises(ConfigError) as error:
        compose_settings(arguments)
    assert expected in str(error.value)


@pytest.mark.parametrize("name", [FigureName.fan_out, FigureName.policies])
def test_a_figure_is_a_table_and_a_picture(tmp_path, capsys, name):
    arguments = [f"figure={name.value}", f"out={tmp_path}", "num_prompts=1", "max_tokens=60", "depth=3"]
    assert main([*arguments, "fan_outs=[1,3]"]) == 0
    table = (tmp_path / f"{name.value}.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in table
    assert f"python -m tools.figures figure={name.value} out={tmp_path.name} num_prompts=1" in table
    assert str(tmp_path) not in table
    assert (tmp_path / f"{name.value}.png").read_bytes().startswith(b"\x89PNG")
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 2
    assert all(0 < float(row[1]) <= 1 for row in rows)


def never(settings):
    raise AssertionError("something was measured")


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setitem(_FIGURES, FigureName.throughput, never)
    assert main(["figure=throughput", "out=/dev/null/a"]) == 2
    assert "error: out=/dev/null/a cannot be written: Not a directory" in capsys.readouterr().err


def test_ctrl_c_ends_with_a_word(tmp_path, capsys, monkeypatch):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setitem(_FIGURES, FigureName.throughput, interrupted)
    assert main(["figure=throughput", f"out={tmp_path}"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_a_mistake_ends_with_one_line(capsys):
    assert main(["figure=fan_out"]) == 2
    assert capsys.readouterr().err.startswith("error: out is missing")


TINY = ["model=emulated", "num_prompts=1", "max_tokens=16", "batches=[1,2]", "depths=[2]", "fan_outs=[1]"]


@pytest.mark.parametrize("name", ["throughput", "backup", "theorem7", "overhead"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_no_figure_is_made_of_tokens_that_are_not_plain_decodings(
    tmp_path, capsys, monkeypatch, name, is_wrong
):
    systems = []

    def fake_measure(config, *, num_groups, max_tokens, temperature, first_seed):
        """Every system decodes alike, but for a last one that prepares outcomes, if it shall be wrong."""
        systems.append(config.speculation.prepare_outcomes)
        last = 7 if is_wrong and config.speculation.prepare_outcomes else 3
        requests = config.max_requests * num_groups
        metrics = msgspec.structs.replace(METRICS, num_rounds=3, decode_seconds=1.0)
        return Measured(
            metrics=[metrics] * requests,
            token_ids=[[number, 2, last] for number in range(requests)],
            tokens_by_source={ProposalSource.HIT: [2], ProposalSource.BACKUP: [1]},
            batch=config.max_requests,
        )

    for module in ("throughput", "theorem7"):
        monkeypatch.setattr(f"tools.figures.{module}.measure", fake_measure)
    status = main([f"figure={name}", f"out={tmp_path}", *TINY])
    captured = capsys.readouterr()
    assert {False, True} <= set(systems)
    assert status == (1 if is_wrong else 0), captured.err
    assert (tmp_path / f"{name}.md").exists() is not is_wrong
    if is_wrong:
        assert "its tokens differ from those of plain decoding" in captured.err


def test_answers_without_a_whole_round_say_nothing_about_theorem_7(tmp_path, monkeypatch):
    metrics = msgspec.structs.replace(METRICS, num_rounds=3, decode_seconds=1.0)
    short = Measured(metrics=[metrics], token_ids=[[1, 2, 3]])
    monkeypatch.setattr("tools.figures.theorem7.measure", lambda config, **_: short)
    assert main(["figure=theorem7", f"out={tmp_path}", *TINY]) == 0
    table = (tmp_path / "theorem7.md").read_text(encoding="utf-8")
    assert "No answer was long enough for a whole round; raise max_tokens." in table
    assert all(line.endswith("| - |") for line in table.splitlines() if line.startswith("| 0."))


def test_the_systems_of_the_overhead_can_be_told_apart_in_the_picture(monkeypatch):
    metrics = msgspec.structs.replace(METRICS, num_rounds=3, decode_seconds=0.05)
    same = Measured(metrics=[metrics], token_ids=[[1, 2, 3]])
    monkeypatch.setattr("tools.figures.throughput.measure", lambda config, **_: same)
    figure = Figure(figsize=(6.4, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    overhead_figure(compose_settings(["figure=overhead", "out=x", *TINY])).draw(axes)
    figure.canvas.draw()
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels if label.get_text()]
        assert len(boxes) > 1
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
