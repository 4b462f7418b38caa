"""Processes that are killed: the error names the stage, and nothing is left, whoever dies and when."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.errors import EngineDead
from pipeline.run_directory import runtime_root, sweep_stale
from tests.processes.runtime import (
    DETOKENIZER,
    PREDICTOR,
    SPECULATOR,
    TOKENIZER,
    VERIFIER,
    children,
    is_alive,
    supervise,
    traces,
    wait_until,
)
from tests.processes.toy_stages import Item

FIVE_STAGES = {
    TOKENIZER: "Echo",
    SPECULATOR: "TensorWriter",
    PREDICTOR: "TensorReader",
    VERIFIER: "Echo",
    DETOKENIZER: "Echo",
}
ROOT = Path(__file__).parents[2]

FRONTEND_PROGRAM = """
import sys, threading
from tests.processes.runtime import collect, supervise, traces, wait_until, SPECULATOR, PREDICTOR, TOKENIZER
from tests.processes.toy_stages import Item
kind = sys.argv[1]
engine = supervise({TOKENIZER: kind, SPECULATOR: "TensorWriter", PREDICTOR: "TensorReader"})

def tell():
    print(*engine.pids.values(), flush=True)

def tell_while_loading():
    wait_until(lambda: any("tokenizer-0" in path for path in traces()))  # it exports, then loads forever
    tell()

try:
    if kind == "NeverReady":
        threading.Thread(target=tell_while_loading).start()
    with engine:
        tell()
        while True:
            engine.send(SPECULATOR, Item(number=1))
            collect(engine, 1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("stopped", flush=True)
"""

ORPHAN_PROGRAM = """
import os, signal, sys
from pathlib import Path
import pipeline.process

def fail(path):
    raise RuntimeError("toy failure of the cleaning")

pipeline.process.remove_run = fail
pipeline.process._watch_supervisor(os.getppid(), Path("unused"))
print("watching", flush=True)
while True:
    signal.pause()
"""


def keep_busy(engine, until_s: float) -> None:
    """Send to every stage and read the answers until the engine fails, or `until_s`."""
    number = 0
    while time.monotonic() < until_s:
        number += 1
        for name in (TOKENIZER, SPECULATOR, VERIFIER, DETOKENIZER):
            engine.send(name, Item(number=number))
        engine.poll(0.01)


@pytest.mark.parametrize("victim", list(FIVE_STAGES), ids=lambda name: name.value)
def test_a_stage_killed_under_load_is_named_and_nothing_is_left(victim):
    engine = supervise(FIVE_STAGES)
    engine.start()
    pids = engine.pids
    keep_busy(engine, time.monotonic() + 0.1)
    os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDead, match=rf"^stage lost: {victim.value} \(pid \d+\) was killed by SIGKILL"):
        keep_busy(engine, began + 10)
    assert time.monotonic() - began < 5
    assert not traces()
    assert not children()
    assert not any(map(is_alive, pids.values()))


def test_a_stage_killed_while_everything_is_idle_is_noticed_at_once():
    with supervise({TOKENIZER: "Echo"}) as engine:
        os.kill(engine.pids[TOKENIZER], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDead, match=r"tokenizer .* was killed by SIGKILL"):
            engine.poll(10)
        assert time.monotonic() - began < 1


def test_a_stage_that_is_terminated_from_outside_is_named():
    with supervise({TOKENIZER: "Echo"}) as engine:
        os.kill(engine.pids[TOKENIZER], signal.SIGTERM)
        with pytest.raises(EngineDead, match=r"tokenizer .* was ended by SIGTERM"):
            engine.poll(10)


def test_a_stage_that_loads_inside_foreign_code_ends_when_it_is_terminated(capfd):
    engine = supervise({TOKENIZER: "LoadsInCallback"}, load_timeout_s=5.0)

    def terminate_while_loading() -> None:
        wait_until(lambda: any("tokenizer-0" in path for path in traces()))
        os.kill(engine.pids[TOKENIZER], signal.SIGTERM)

    terminating = threading.Thread(target=terminate_while_loading)
    terminating.start()
    with pytest.raises(EngineDead, match=r"tokenizer .* was ended by SIGTERM"):
        engine.start()
    terminating.join()
    assert capfd.readouterr().err == ""
    assert not traces()


def start_frontend(kind: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A frontend process of its own, in a process group of its own, and the pids of its stages."""
    process = subprocess.Popen(
        [sys.executable, "-c", FRONTEND_PROGRAM, kind],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("kind", ["Echo", "NeverReady"], ids=["running", "loading"])
def test_stages_end_by_themselves_when_the_frontend_is_killed(kind):
    frontend, pids = start_frontend(kind)
    with frontend:
        assert len(pids) == 3
        frontend.kill()
        frontend.wait(10)
    wait_until(lambda: not any(map(is_alive, pids)), 5)
    wait_until(lambda: not traces(frontend.pid), 5)


def test_a_stage_without_a_supervisor_ends_even_if_it_cannot_clean_up():
    orphan = subprocess.Popen(
        [sys.executable, "-c", ORPHAN_PROGRAM],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with orphan:
        try:
            assert orphan.stdout.readline() == "watching\n"
            orphan.stdin.close()
            assert orphan.wait(10) == 1
        finally:
            orphan.kill()


def stages_of(supervisor_pid: int) -> set[int]:
    """Stage processes of one supervisor, whether it lives or not."""
    wanted = f"--supervisor-pid\0{supervisor_pid}\0".encode()
    pids = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes():
                pids.add(int(path.parent.name))
    return pids


@pytest.mark.parametrize("seed", range(6))
def test_no_stage_is_left_whenever_the_frontend_is_killed(seed):
    # From the first line of the supervisor's start to the first messages: about half a second.
    delay_s = random.Random(seed).uniform(0.0, 0.7)
    frontend = subprocess.Popen(
        [sys.executable, "-c", FRONTEND_PROGRAM, "Echo"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with frontend:
        wait_until(lambda: bool(traces(frontend.pid)))
        with pytest.raises(subprocess.TimeoutExpired):
            frontend.wait(delay_s)
        frontend.kill()
        frontend.wait(10)
    wait_until(lambda: not stages_of(frontend.pid), 5)
    # Killed before its first stage, it leaves a run directory to the next engine.
    sweep_stale(runtime_root())
    assert not traces(frontend.pid)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_stages_run_whatever_standard_streams_the_frontend_lacks(tmp_path, closed):
    program = """
import sys
from pipeline.standard_streams import open_missing_streams
open_missing_streams()
from tests.processes.runtime import TOKENIZER, collect, supervise
from tests.processes.toy_stages import Item
with supervise({TOKENIZER: "Echo"}) as engine:
    engine.send(TOKENIZER, Item(number=7))
    open(sys.argv[1], "w").write(str(collect(engine, 1)[0].number))
"""
    told = tmp_path / "told"
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", program, str(told)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert told.read_text() == "7"


def test_nothing_is_left_in_shared_memory_when_everything_is_killed_at_once():
    frontend, pids = start_frontend("Echo")
    with frontend:
        for pid in (frontend.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        frontend.wait(10)
    wait_until(lambda: not any(map(is_alive, pids)), 5)
    assert not [path for path in traces(frontend.pid) if path.startswith("/dev/shm")]
    # Nobody was left to remove the run directory: the next engine does.
    with supervise({TOKENIZER: "Echo"}):
        assert not traces(frontend.pid)


@pytest.mark.parametrize("kind", ["Echo", "NeverReady"], ids=["running", "loading"])
def test_ctrl_c_in_the_whole_process_group_reaches_the_frontend_alone_which_stops_everything(kind):
    frontend, pids = start_frontend(kind)
    with frontend:
        began = time.monotonic()
        os.killpg(frontend.pid, signal.SIGINT)
        output, complaints = frontend.communicate(timeout=10)
    assert (output.split(), complaints) == (["interrupted", "stopped"], "")
    assert time.monotonic() - began < 5
    assert frontend.returncode == 0
    assert not any(map(is_alive, pids))
    assert not traces(frontend.pid)
