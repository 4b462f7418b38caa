"""The command line with the real stages and the demo model."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline.samples import sample_seed

pytestmark = pytest.mark.demo

STAGES = ["tokenizer", "draft-speculator", "outcome-predictor", "target-verifier", "detokenizer"]


def start(folder, *argv):
    command = [sys.executable, "-m", "pipeline.run", *argv]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def stage_pids(process):
    """The stage processes of a run, by name."""
    # -ww: where COLUMNS is set, ps would cut the lines off, and the names with them.
    listing = subprocess.run(
        ["ps", "-ww", "--ppid", str(process.pid), "-o", "pid=,args="],
        capture_output=True,
        text=True,
        check=False,
    )
    words = [line.split() for line in listing.stdout.splitlines() if "pipeline.process" in line]
    return {line[line.index("pipeline.process") + 1]: int(line[0]) for line in words}


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_rows_with_options_of_their_own_share_rounds(tmp_path):
    prompt = "Count from one to nine."
    options = [
        {"logit_bias": {"28": 100}, "stop_token_ids": [28], "min_tokens": 3, "logprobs": 2},
        {"logit_bias": {"28": 100}, "stop": [",,"], "echo": True},
        {"logit_bias": {"28": 100}, "stop": [",,"], "min_tokens": 4, "presence_penalty": 2.0},
    ]
    rows = [json.dumps({"prompt": prompt, "sampling": sampling}) + "\n" for sampling in options]
    (tmp_path / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    arguments = ["prompts_file=rows.jsonl", "output=out.jsonl", "max_tokens=8", "max_requests=3", "seed=1"]
    process = start(tmp_path, "conf=saguaro_tree", "n=2", *arguments)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    answers = {answer["request_id"]: answer for answer in map(json.loads, lines)}
    assert sorted(answers) == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]
    assert [answers[f"0/{sample}"]["seed"] for sample in range(2)] == [1, sample_seed(1, 1)]
    # The comma, token 28, comes at once unless it is banned.
    banned, echoed, late = (answers[f"{row}/0"] for row in range(3))
    assert (banned["stop_reason"], banned["token_ids"][3:], 28 in banned["token_ids"][:3]) == (
        28,
        [28],
        False,
    )
    assert [entry["token_id"] for entry in banned["logprobs"]] == banned["token_ids"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in banned["logprobs"])
    assert (echoed["stop_reason"], echoed["token_ids"]) == (",,", [28, 28])
    assert prompt in echoed["text"]
    assert not echoed["text"].endswith(",")
    assert (late["stop_reason"], late["token_ids"], late["text"]) == (",,", [28] * 5, ",,,")
    assert late["finish_reason"] == "stop"


def test_saguaro_answers_a_conversation_and_an_empty_prompt_fails_alone(tmp_path):
    rows = [{"turns": ["Name a colour.", "Name another one."]}, {"prompt": ""}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    process = start(tmp_path, "conf=saguaro", "prompts_file=rows.jsonl", "output=out.jsonl", "max_tokens=6")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 2, stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [answer["request_id"] for answer in answers] == ["0.0", "0.1", "1"]
    assert "the prompt is empty" in answers[2]["error"]
    for answer in answers[:2]:
        metrics = answer["metrics"]
        assert answer["text"] in stdout
        assert answer["num_output_tokens"] == len(answer["token_ids"]) <= 6
        assert metrics["num_accepted_tokens"] + metrics["num_rounds"] >= answer["num_output_tokens"]
        assert metrics["cache_hits"] + metrics["cache_misses"] == metrics["num_rounds"] - 1
    assert answers[1]["num_prompt_tokens"] > answers[0]["num_prompt_tokens"] + answers[0]["num_output_tokens"]
    assert "outcome-predictor busy" in stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def traces(temporary):
    """What a run may leave behind on disk: its run directory, and its shared memory."""
    shared = [name for name in os.listdir("/dev/shm") if name.startswith("ssd-")]
    return [*shared, *(file.name for file in temporary.iterdir())]


@pytest.fixture
def long_answer(tmp_path, monkeypatch):
    """A saguaro run in the middle of its answer, its stages, and where its run directory is."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    process = start(tmp_path, "conf=saguaro", "prompt=Tell a long story.", "max_tokens=4000")
    try:
        assert process.stdout.read(1)
        pids = stage_pids(process)
        assert set(pids) == set(STAGES)
        assert traces(temporary) != []
        yield process, pids, temporary
    finally:  # a test that failed leaves no process behind: later tests count their children
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_ends_the_run_within_five_seconds_and_is_named(long_answer, stage):
    process, pids, temporary = long_answer
    began = time.monotonic()
    os.kill(pids[stage], signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - began < 5
    assert process.returncode == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert stage in line
    assert not any(is_alive(pid) for pid in pids.values())
    assert traces(temporary) == []


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["ctrl-c", "shutdown", "hang-up"],
)
def test_a_signal_to_all_processes_ends_the_run_within_five_seconds_and_leaves_nothing(
    long_answer, number, status
):
    process, pids, temporary = long_answer
    began = time.monotonic()
    for pid in (process.pid, *pids.values()):
        os.kill(pid, number)
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - began < 5
    assert process.returncode == status
    assert "error: " not in stderr
    assert "Traceback" not in stderr
    assert not any(is_alive(pid) for pid in pids.values())
    assert traces(temporary) == []
