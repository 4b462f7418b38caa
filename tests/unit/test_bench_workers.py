"""Both ends of a worker: the bench's, with real processes that misbehave, and the worker's own loop."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import tools
from conf.schema import RunConfig
from pipeline.errors import RequestError
from tests import fake_bench_worker
from tests.bench_plans import make_answer, make_batch, make_peer, make_question
from tools.bench import worker
from tools.bench.protocol import (
    Answer,
    Answers,
    Batch,
    EngineSpec,
    Failed,
    FromWorker,
    Ready,
    Skipped,
    ToWorker,
)
from tools.bench.worker_process import WorkerLost, WorkerProcess

FAKE = (sys.executable, str(Path(fake_bench_worker.__file__)))
SPEC = EngineSpec(config=RunConfig())


@contextmanager
def started(*arguments: str) -> Iterator[WorkerProcess]:
    process = WorkerProcess(SPEC, command=(*FAKE, *arguments))
    try:
        yield process
    finally:
        process.abandon()
        process.close()  # twice does no harm


def batch(text: str, *, size: int = 1) -> Batch:
    return make_batch(*[msgspec.structs.replace(make_question(), text=text)] * size)


def test_a_worker_answers_one_question_after_the_other() -> None:
    with started() as process:
        assert process.start(20) == Ready(given="a fake")
        for _ in range(2):
            answers = process.ask(batch("anything", size=2), 20)
            assert [answer.token_ids for answer in answers] == [[1, 2], [1, 2]]
        process.close()


@pytest.mark.parametrize(
    ("text", "timeout_s", "reason"),
    [
        (
            "die",
            20,
            "was ended by SIGKILL; its last words: about to start / a library's chatter / about to die",
        ),
        ("hang", 0.3, "within 0.3 s; its last words: about to start / a library's chatter / about to hang"),
        ("garble", 20, "sent what is no message"),
        ("fail", 20, "RequestError: the prompt is empty"),
        ("lose", 20, "gave 0 answers to 1 questions"),
    ],
)
def test_a_worker_that_misbehaves_is_lost_with_its_last_words(
    text: str, timeout_s: float, reason: str
) -> None:
    with started() as process:
        process.start(20)
        began = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            process.ask(batch(text), timeout_s)
        process.abandon()
        assert time.monotonic() - began < 10
    assert reason in str(caught.value)


@pytest.mark.parametrize(("how", "reason"), [("die", "was ended by SIGKILL"), ("hang", "within 0.5 s")])
def test_a_worker_that_never_gets_ready_is_lost(how: str, reason: str) -> None:
    with started(how) as process, pytest.raises(WorkerLost, match=reason):
        process.start(20 if how == "die" else 0.5)


def test_a_worker_measures_the_source_of_the_bench_and_not_what_is_installed() -> None:
    code = "import json, tools; input(); print(json.dumps({'type': 'Skipped', 'reason': tools.__file__}))"
    # -S: nothing is installed.
    process = WorkerProcess(SPEC, command=(sys.executable, "-P", "-S", "-c", code))
    try:
        reply = process.start(30)
    finally:
        process.close()
    assert isinstance(reply, Skipped)
    assert reply.reason == tools.__file__


def test_a_worker_that_cannot_be_started_is_lost(tmp_path: Path) -> None:
    process = WorkerProcess(SPEC, command=(str(tmp_path / "nothing"),))
    with pytest.raises(WorkerLost, match="cannot be started"):
        process.start(1)
    process.abandon()


class OpenedSystem:
    """Stands in for a module with `open_system`."""

    def __init__(self) -> None:
        self.given = "opened"
        self.is_open = False

    @contextmanager
    def open_system(self, spec: object) -> Iterator[OpenedSystem]:
        self.is_open = True
        yield self
        self.is_open = False

    def answer(self, batch: Batch) -> list[Answer]:
        if batch.questions[0].text == "refuse":
            raise RequestError("the prompt is empty")
        if batch.questions[0].text == "break":
            raise ZeroDivisionError("a bug")
        return [make_answer([question.seed]) for question in batch.questions]


def serve(*lines: ToWorker) -> tuple[int, list[FromWorker]]:
    out = io.BytesIO()
    status = worker.serve(io.BytesIO(b"".join(msgspec.json.encode(line) + b"\n" for line in lines)), out)
    return status, [msgspec.json.decode(line, type=FromWorker) for line in out.getvalue().splitlines()]


def test_the_loop_answers_until_the_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    system = OpenedSystem()
    monkeypatch.setattr(worker.importlib, "import_module", lambda name: system)
    status, replies = serve(
        SPEC, make_batch(make_question(4), make_question(5)), make_batch(make_question(6))
    )
    assert (status, system.is_open) == (0, False)
    assert replies == [
        Ready(given="opened"),
        Answers(answers=[make_answer([4]), make_answer([5])]),
        Answers(answers=[make_answer([6])]),
    ]


def test_the_loop_says_what_failed_and_shows_bugs_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker.importlib, "import_module", lambda name: OpenedSystem())
    assert serve(SPEC, batch("refuse"), batch("anything")) == (
        1,
        [Ready(given="opened"), Failed(reason="RequestError: the prompt is empty")],
    )
    assert capsys.readouterr().err == ""
    assert serve(SPEC, batch("break"))[1][-1] == Failed(reason="ZeroDivisionError: a bug")
    assert "Traceback" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_says_so_and_gets_its_cores_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append(cores))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # what Python takes for: cannot be imported
    status, (reply,) = serve(make_peer("llama_cpp"))
    assert status == 0
    assert isinstance(reply, Skipped)
    assert "pip install llama-cpp-python" in reply.reason
    assert pinned == [[0]]
    assert os.environ["OMP_NUM_THREADS"] == "1"
