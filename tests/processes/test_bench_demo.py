"""`python -m tools.bench` with two of our systems on the demo model, in real worker processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.demo


def bench(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "tools.bench",
        f"out={out}",
        "num_prompts=2",
        "max_tokens=8",
        *SETTINGS,
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_two_of_our_systems_are_measured_in_turns_and_the_same_command_only_reports(tmp_path: Path) -> None:
    systems = "systems=autoregressive,short=saguaro+speculation.depth=2"
    done = bench(tmp_path, "repeats=2", systems)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "table.md").read_text()
    content = json.loads((tmp_path / "results.json").read_text())
    plain, short = content["figures"]
    assert (plain["label"], short["label"]) == ("autoregressive", "short")
    assert plain["tokens"]["text"] == short["tokens"]["text"] == "4 of 4 identical"
    assert plain["tokens_per_second"] > 0
    assert short["ratio"]["interval"][0] <= short["ratio"]["value"] <= short["ratio"]["interval"][1]
    assert short["rounds"]["num_rounds"] <= plain["rounds"]["num_rounds"] == 16
    assert len(content["answers"]) == 8
    assert "depth 2" in content["systems"]["short"]["given"]
    assert "target on cores" in content["systems"]["short"]["given"]

    # Who works on the engine meanwhile must not make this test fail.
    systems_again = (systems, "mix_sources=true")
    again = bench(tmp_path, "repeats=2", *systems_again)
    assert again.returncode == 0, again.stderr
    assert "8 of 8 answers are there already" in again.stderr
    assert "loading" not in again.stderr
    assert json.loads((tmp_path / "results.json").read_text())["figures"] == content["figures"]

    other = bench(tmp_path, "repeats=2", *systems_again, "seed=2")
    assert other.returncode == 2
    assert "holds answers of another run (other: prompts)" in other.stderr
