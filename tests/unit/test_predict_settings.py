"""Arguments of `python -m tools.predict`: its own keys, the engine's, and what it says of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import FanOut
from pipeline.errors import ConfigError
from tools.predict.command import main
from tools.predict.settings import compose_study


def test_lists_are_read_and_keys_of_the_engine_are_passed_on() -> None:
    study = compose_study(
        [
            "out=here", "policies=uniform, calibrated", "temperatures=0,0.7", "budgets=8,24", "max_tokens=5",
            "speculation.backup=sequential", "model.dtype=float32",
        ]
    )  # fmt: skip
    assert study.policies == [FanOut.uniform, FanOut.calibrated]
    assert (study.temperatures, study.budgets) == ([0.0, 0.7], [8, 24])
    assert study.engine_arguments == ["speculation.backup=sequential", "model.dtype=float32"]
    assert (study.settings.max_tokens, study.settings.prompts) == (5, None)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("policies=uniform,likeliest", "some of uniform, geometric, calibrated, got 'likeliest'"),
        ("policies=uniform,uniform", "uniform comes twice"),
        ("budgets=0", "whole numbers from 1"),
        ("budgets=many", "whole numbers from 1"),
        ("temperatures=0,nan", "numbers from 0"),
        ("temperatures=-1", "numbers from 0"),
        ("temperatures=", "temperatures= is empty"),
        ("num_prompts=0", "expected at least 1"),
        ("conf=saguaro", "follows from systems="),
        ("speculation.fan_out=uniform", "follows from policies="),
        ("speculation.budget=4", "follows from budgets="),
        ("temperature=1", "follows from temperatures="),
        ("max_requests=2", "one by one"),
        ("polices=uniform", "did you mean policies?"),
    ],
)
def test_mistakes_are_named(argument: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        compose_study(["out=here", argument])


def test_the_folder_is_needed() -> None:
    with pytest.raises(ConfigError, match="out is missing"):
        compose_study(["max_tokens=4"])


@pytest.mark.parametrize(
    ("systems", "says"),
    [
        ("speculative", "prepares no outcomes"),
        ("llama_cpp", "another engine"),
        ("saguaro+speculation.plan=auto", "goes by the clock"),
        ("saguaro+speculation.depth=0", "expected at least 1"),
    ],
)
def test_a_system_that_cannot_be_studied_ends_the_command_with_status_2(
    systems: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"out={tmp_path}", f"systems={systems}"]) == 2
    assert says in capsys.readouterr().err


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(f"\n{key}=" in help_text for key in ("out", "systems", "policies", "budgets", "threads"))
