"""`python -m tools.predict` on the demo model."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.demo


def test_two_policies_are_compared_and_return_the_same_tokens(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "tools.predict", f"out={tmp_path}", "systems=saguaro",
        "policies=uniform,calibrated", "temperatures=1", "budgets=6", "num_prompts=1", "max_tokens=8",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "table.md").read_text()
    assert "same in every cell: 1 of 1" in done.stdout
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [cell["key"]["policy"] for cell in cells] == ["uniform", "calibrated"]
    for cell in cells:
        (answer,) = cell["answers"]
        assert answer["hits"] + answer["misses"] == answer["num_rounds"] - 1
        assert sum(answer["rank_counts"]) > 0
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "miss_rates.png").exists() == has_matplotlib
