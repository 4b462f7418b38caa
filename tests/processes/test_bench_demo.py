"""`python -m tools.bench` with two of our systems on the demo model, in real worker processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.demo


def bench(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "tools.bench", f"out={out}", "num_prompts=2", "max_tokens=8",
        "setups=same_target_cores", "systems=autoregressive,short=saguaro+speculation.depth=2", *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_two_of_our_systems_are_measured_in_turns_and_the_same_folder_takes_more_cases(
    tmp_path: Path,
) -> None:
    done = bench(tmp_path, "repeats=2")
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
    (phase,) = content["systems"]["short"]["phases"]
    assert "depth 2" in phase["given"]
    assert "target on cores" in phase["given"]

    # Who works on the engine meanwhile must not make this test fail.
    more = bench(tmp_path, "repeats=1", "mix_sources=true", "temperatures=0,1", "batch_sizes=1,2")
    assert more.returncode == 0, more.stderr
    assert "4 of 12 answers are there already" in more.stderr
    figures = json.loads((tmp_path / "results.json").read_text())["figures"]
    cases = [(f["case"]["phase"]["batch_size"], f["case"]["temperature"]) for f in figures[::2]]
    assert cases == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert {figure["tokens"]["text"] for figure in figures} == {"2 of 2 identical"}
    assert all(figure["token_gaps"]["median_ms"] > 0 for figure in figures)
    assert (tmp_path / "batches.png").read_bytes().startswith(b"\x89PNG")

    other = bench(tmp_path, "mix_sources=true", "seed=2")
    assert other.returncode == 2
    assert "holds answers of another run (other: prompts)" in other.stderr
