"""The command line from its arguments to its exit status, with an engine that has no stages."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.run import main
from tests.fake_engine import FakeEngine
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_level, save_model_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("chat"), byte_level(), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("base"), byte_level())


class Outcome:
    """What one run of the command line left."""

    def __init__(self, status, captured, engine):
        self.status, self.stdout, self.stderr, self.engine = status, captured.out, captured.err, engine

    @property
    def errors(self):
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path, base_model):
    """Run the command line on the model without a chat template, from an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_once(*argv):
        engines = []

        def open_engine(config):
            engines.append(FakeEngine(config))
            return engines[-1]

        if not any(argument.startswith("model") for argument in argv):
            argv = (*argv, f"model.path={base_model}")
        status = main(argv, open_engine=open_engine)
        return Outcome(status, capsys.readouterr(), engines[0] if engines else None)

    return run_once


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answers_in(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def start(*argv, stdout=subprocess.PIPE):
    """Start the command line in a process of its own, with the fake engine."""
    command = [sys.executable, "-m", "tests.fake_engine", *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_single_prompt_prints_its_answer_and_nothing_else(run, tmp_path):
    outcome = run("conf=ssd", "prompt=say one two", "max_tokens=9")
    assert (outcome.status, outcome.stdout) == (0, "one two\n")
    assert "acceptance length" in outcome.stderr
    assert "target-verifier busy" in outcome.stderr
    assert outcome.engine.samplings["0"].max_tokens == 9
    assert outcome.engine.is_stopped
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["say a, b!", "say k=v", "say ${x}", "say 'q' \"r\"", "say 1\nsay 2", "say  x "]
)
def test_a_prompt_reaches_the_engine_as_it_stands(run, text):
    assert run(f"prompt={text}").stdout == text.removeprefix("say ") + "\n"


def test_without_a_prompt_the_built_in_ones_are_answered(run):
    outcome = run()
    assert outcome.status == 0
    assert outcome.engine.submitted == ["0", "1", "2", "3"]
    assert outcome.stdout.count("--- ") == 4


def test_several_answers_are_headed_by_their_prompts(run, tmp_path):
    rows = write_rows(tmp_path / "p.jsonl", {"prompt": "say one"}, {"prompt": "say two"})
    outcome = run(f"prompts_file={rows}")
    assert outcome.stdout == "--- 0: say one\none\n\n--- 1: say two\ntwo\n\n"
    assert outcome.engine.most_in_flight == 1


def test_requests_that_share_rounds_are_printed_whole(run, tmp_path):
    rows = write_rows(tmp_path / "p.jsonl", *({"prompt": f"say a{i} b{i}"} for i in range(5)))
    outcome = run(f"prompts_file={rows}", "max_requests=3")
    blocks = outcome.stdout.removesuffix("\n\n").split("\n\n")
    assert sorted(blocks) == [f"--- {i}: say a{i} b{i}\na{i} b{i}" for i in range(5)]
    assert outcome.engine.most_in_flight == 3


def test_the_output_file_has_one_object_a_request(run, tmp_path):
    rows = write_rows(tmp_path / "p.jsonl", {"prompt": "say one two"}, {"prompt": "fail too long"})
    outcome = run(f"prompts_file={rows}", "output=out.jsonl", "seed=5")
    first, second = answers_in(tmp_path / "out.jsonl")
    assert (first["request_id"], first["text"], first["token_ids"]) == ("0", "one two", [0, 1])
    assert (first["seed"], first["finish_reason"]) == (5, "length")
    assert set(second) == {*first, "error"}
    assert (second["request_id"], second["finish_reason"], second["error"]) == ("1", "error", "too long")
    assert outcome.status == 2


def test_a_run_that_never_gets_ready_leaves_the_last_answers_alone(capsys, tmp_path, base_model):
    (tmp_path / "old.jsonl").write_text("answers\n", encoding="utf-8")

    def open_engine(config):
        raise ConfigError("the draft does not load")

    argv = ("prompt=say x", f"output={tmp_path / 'old.jsonl'}", f"model.path={base_model}")
    assert main(argv, open_engine=open_engine) == 2
    assert "the draft does not load" in capsys.readouterr().err
    assert (tmp_path / "old.jsonl").read_text(encoding="utf-8") == "answers\n"


def test_an_output_inside_the_model_is_refused(run, base_model):
    before = (base_model / "tokenizer.json").read_bytes()
    for name in ("tokenizer.json", "answers.jsonl"):
        outcome = run("prompt=say x", f"output={base_model / name}")
        assert (outcome.status, outcome.engine) == (2, None)
        assert "belongs to the model model.path=" in outcome.errors[0]
    assert (base_model / "tokenizer.json").read_bytes() == before
    assert not (base_model / "answers.jsonl").exists()


def test_a_fresh_seed_is_returned_with_the_answer(run, tmp_path):
    outcome = run("prompt=say x", "output=out.jsonl")
    (answer,) = answers_in(tmp_path / "out.jsonl")
    assert answer["seed"] == outcome.engine.samplings["0"].seed


def test_a_conversation_goes_on_from_its_own_answers(run, tmp_path, chat_model):
    rows = write_rows(tmp_path / "p.jsonl", {"turns": ["say hi", "say bye"]}, {"prompt": "say x"})
    outcome = run(f"prompts_file={rows}", f"model.path={chat_model}", "output=out.jsonl")
    assert outcome.engine.submitted == ["0.0", "0.1", "1"]
    spoken = [(turn.role, turn.content) for turn in outcome.engine.chats["0.1"]]
    assert spoken == [("user", "say hi"), ("assistant", "hi"), ("user", "say bye")]
    assert [row["request_id"] for row in answers_in(tmp_path / "out.jsonl")] == ["0.0", "0.1", "1"]


def test_chat_is_used_if_the_model_has_a_template_unless_told_otherwise(run, chat_model, base_model):
    assert run("prompt=say x", f"model.path={chat_model}").engine.chats["0"] is not None
    assert run("prompt=say x", f"model.path={chat_model}", "chat=false").engine.chats["0"] is None
    assert run("prompt=say x", f"model.path={base_model}").engine.chats["0"] is None


def test_one_failing_row_leaves_the_others_alone(run, tmp_path):
    rows = write_rows(
        tmp_path / "p.jsonl", {"prompt": "say one"}, {"prompt": "fail too\nlong"}, {"prompt": "say two"}
    )
    outcome = run(f"prompts_file={rows}")
    assert outcome.status == 2
    assert outcome.errors == [f"error: {rows}:2: too long"]
    assert "one" in outcome.stdout
    assert "two" in outcome.stdout


def test_a_row_of_token_ids_goes_past_the_chat_template_and_bad_ids_fail_alone(run, tmp_path, chat_model):
    rows = write_rows(
        tmp_path / "p.jsonl",
        {"prompt_token_ids": [4, 5], "sampling": {"seed": 3}},
        {"prompt_token_ids": [6, -1]},
        {"prompt_token_ids": []},
        {"prompt": "say x"},
    )
    outcome = run(f"prompts_file={rows}", f"model.path={chat_model}", "output=out.jsonl")
    assert outcome.status == 2
    assert outcome.stdout.startswith("--- 0: token ids 4, 5\n4 5\n\n")
    assert outcome.errors == [
        f"error: {rows}:2: prompt_token_ids[1]: expected a token id, 0 to 2147483647, got -1; correct it",
        f"error: {rows}:3: prompt_token_ids is empty: expected at least one token id; add it",
    ]
    assert outcome.engine.token_ids == {"0": [4, 5], "3": None}
    assert outcome.engine.chats["0"] is None
    assert outcome.engine.samplings["0"].seed == 3
    written = answers_in(tmp_path / "out.jsonl")
    assert [row["prompt_token_ids"] for row in written] == [[4, 5], [6, -1], [], None]
    assert [row["prompt"] for row in written] == [None, None, None, "say x"]
    assert [row["text"] for row in written] == ["4 5", None, None, "x"]


def test_a_failing_turn_is_named(run, tmp_path, chat_model):
    rows = write_rows(
        tmp_path / "p.jsonl", {"turns": ["say a", "fail too long", "say b"]}, {"prompt": "say x"}
    )
    outcome = run(f"prompts_file={rows}", f"model.path={chat_model}", "output=out.jsonl")
    assert outcome.errors == [f"error: {rows}:1, turn 2 of 3: too long"]
    errors = [row.get("error") for row in answers_in(tmp_path / "out.jsonl")]
    assert errors == [None, "too long", "turn 2 of 3 failed: too long", None]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["conf=saguro"], "there is no named run 'saguro'"),
        (["max_token=3"], "did you mean max_tokens?"),
        (["max_tokens=many"], "max_tokens=many: expected a whole number"),
        (["max_tokens=0"], "max_tokens=0: expected at least 1"),
        (["prompt="], "prompt= is empty"),
        (["prompts_file=nothing.txt"], "nothing.txt cannot be read"),
        (["output=no/where.jsonl"], "there is no folder no"),
        (["output=."], "is a folder"),
        (["model.path=no/such/model"], "model.path=no/such/model"),
        (["speculation.draft.path=./nowhere"], "speculation.draft.path=./nowhere does not exist"),
        (["chat=true"], "has no chat template; set chat=false"),
        (["hello"], "expected key=value"),
    ],
)
def test_bad_input_ends_with_one_line_before_anything_starts(run, monkeypatch, argv, expected):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = run(*argv)
    assert outcome.status == 2
    assert outcome.engine is None
    assert outcome.stdout == ""
    (line,) = [line for line in outcome.stderr.splitlines() if not line.startswith("fetching ")]
    assert line.startswith("error: ")
    assert expected in line


def test_conversations_need_a_chat_template(run, tmp_path):
    rows = write_rows(tmp_path / "p.jsonl", {"turns": ["say hi"]})
    outcome = run(f"prompts_file={rows}")
    assert (outcome.status, outcome.engine) == (2, None)
    assert "has turns, expected a prompt" in outcome.stderr


def test_a_lost_stage_ends_the_run_with_its_name(run, tmp_path):
    rows = write_rows(tmp_path / "p.jsonl", {"prompt": "say one"}, {"prompt": "die"})
    outcome = run(f"prompts_file={rows}", "output=out.jsonl")
    assert outcome.status == 1
    assert outcome.errors == ["error: stage lost: target-verifier (pid 1) was killed by SIGKILL"]
    assert outcome.engine.is_stopped
    assert [row["text"] for row in answers_in(tmp_path / "out.jsonl")] == ["one"]


def test_a_stage_that_ends_because_everything_is_shut_down_is_not_called_lost(run):
    outcome = run("prompt=shutdown")
    assert outcome.status == 143
    assert outcome.errors == []
    assert "stopped: " in outcome.stderr
    assert outcome.engine.is_stopped


def test_help_lists_runs_and_keys(run):
    outcome = run("--help")
    assert (outcome.status, outcome.engine) == (0, None)
    for expected in ("saguaro", "autoregressive", "speculation.draft.kind", "prompts_file", "default 128"):
        assert expected in outcome.stdout


def wait_for(stream, expected):
    """Read until the expected text came; the process's end ends the wait."""
    seen = ""
    while expected not in seen:
        character = stream.read(1)
        assert character, f"expected {expected!r}, got {seen!r}"
        seen += character
    return seen


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_one_signal_cancels_keeps_what_was_answered_and_stops(tmp_path, base_model, number, status):
    rows = write_rows(
        tmp_path / "p.jsonl", {"prompt": "say one"}, {"prompt": "hang"}, {"prompt": "say never"}
    )
    output = tmp_path / "out.jsonl"
    process = start(f"model.path={base_model}", f"prompts_file={rows}", f"output={output}")
    wait_for(process.stdout, "partial")
    began = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=10)
    assert time.monotonic() - began < 5
    assert process.returncode == status
    assert "never" not in stdout
    assert "engine stopped" in stderr
    assert "Traceback" not in stderr
    assert [row["finish_reason"] for row in answers_in(output)] == ["length", "cancelled"]


def test_ctrl_c_while_the_program_is_still_being_imported_ends_it_quietly(tmp_path, monkeypatch):
    slow = "import signal\nprint('importing', flush=True)\nwhile True:\n    signal.pause()\n"
    (tmp_path / "hydra.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeline.run"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(process.stdout, "importing")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, stderr) == (130, "")


def test_an_engine_that_does_not_cancel_is_stopped_all_the_same(base_model):
    process = start(f"model.path={base_model}", "prompt=deaf")
    wait_for(process.stdout, "partial")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert time.monotonic() - began < 5
    assert process.returncode == 130
    assert "engine stopped" in stderr


def test_a_second_ctrl_c_aborts_at_once(base_model):
    process = start(f"model.path={base_model}", "prompt=deaf")
    wait_for(process.stdout, "partial")
    process.send_signal(signal.SIGINT)
    wait_for(process.stderr, "once more aborts")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "engine stopped" in stderr
    assert "aborted" in stderr
    assert "Traceback" not in stderr


def test_a_reader_that_leaves_ends_the_run_quietly(tmp_path, base_model):
    rows = write_rows(tmp_path / "p.jsonl", *({"prompt": "say " + "long " * 2000} for _ in range(40)))
    process = start(f"model.path={base_model}", f"prompts_file={rows}")
    process.stdout.read(1)
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(timeout=10) == 141
    assert "engine stopped" in stderr
    assert "Traceback" not in stderr
    assert "error" not in stderr.lower()


def test_a_full_disk_is_said_in_one_line(base_model):
    with open("/dev/full", "w") as full:
        process = start(f"model.path={base_model}", "prompt=say x", stdout=full)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "error: the answers cannot be written to stdout: No space left on device\n" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_with_closed_standard_streams_goes_on_without_them(tmp_path, base_model, closed):
    output = tmp_path / "out.jsonl"
    command = f'exec "$0" "$@" {closed}'
    argv = ["-m", "tests.fake_engine", f"model.path={base_model}", "prompt=say x", f"output={output}"]
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if ">&-" in closed.split() else "x\n")
    assert ("engine stopped" in done.stderr) == ("2>&-" not in closed)
    assert "Traceback" not in done.stderr
    assert [row["text"] for row in answers_in(output)] == ["x"]


@pytest.mark.parametrize("argument", ["--help", "prompt=say x", "output=/dev/full"])
def test_what_cannot_be_written_is_said_in_one_line(base_model, argument):
    argv = [f"model.path={base_model}", argument]
    with open("/dev/null" if argument.startswith("output") else "/dev/full", "w") as stdout:
        process = start(*argv, stdout=stdout)
    _, stderr = process.communicate(timeout=10)
    (line,) = [line for line in stderr.splitlines() if "error" in line]
    assert line.startswith("error: the answers cannot be written")
    assert line.endswith("No space left on device")
    assert process.returncode == 1


def test_a_current_folder_that_was_deleted_is_named(tmp_path, base_model):
    folder = tmp_path / "gone"
    folder.mkdir()
    command = 'rmdir "$PWD"; exec "$0" "$@"'
    argv = ["-P", "-m", "tests.fake_engine", f"model.path={base_model}", "prompt=say x"]
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    expected = "error: the current folder does not exist any more; cd somewhere else\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_another_error_of_the_system_is_not_called_unwritable_answers(run, monkeypatch):
    def fail(config):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "some/file")

    monkeypatch.setattr("pipeline.run.resolve_models", fail)
    outcome = run("prompt=say x")
    assert outcome.status == 1
    (line,) = outcome.errors
    assert "Too many open files" in line
    assert "some/file" in line
    assert "answers" not in line


def test_answers_that_cannot_be_shown_after_a_hang_up_are_a_hang_up(run, monkeypatch):
    class ClosedTerminal(io.StringIO):
        def write(self, text):
            os.kill(os.getpid(), signal.SIGHUP)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("sys.stdout", ClosedTerminal())
    assert run("prompt=say x").status == 129


def test_the_frontend_imports_no_torch_and_no_tokenizer():
    code = (
        "import sys, pipeline.run; "
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
