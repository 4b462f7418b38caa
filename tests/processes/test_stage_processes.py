"""Stages in processes: order, tensors, placement, refusals, statistics, and stopping without a trace."""

import collections
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, EngineDead
from pipeline.supervisor import Supervisor
from tests.processes.runtime import (
    DETOKENIZER,
    FRONTEND,
    PREDICTOR,
    SPECULATOR,
    TOKENIZER,
    VERIFIER,
    children,
    collect,
    is_alive,
    open_files,
    supervise,
    toy,
    traces,
)
from tests.processes.toy_stages import Item, Settings, TensorItem


def test_messages_of_one_sender_stay_in_order_through_two_stages():
    began_ns = time.monotonic_ns()
    with supervise({TOKENIZER: "Relay", VERIFIER: "Echo"}, Settings(receiver=VERIFIER)) as engine:
        for number in range(2000):
            engine.send(TOKENIZER, Item(number=number))
        assert [item.number for item in collect(engine, 2000)] == list(range(2000))
        stats = engine.stats()
    assert (stats[TOKENIZER].num_received, stats[TOKENIZER].num_sent) == (2000, 2000)
    assert (stats[VERIFIER].num_dropped, stats[VERIFIER].num_refused) == (0, 0)
    assert 0 < stats[VERIFIER].busy_ns < time.monotonic_ns() - began_ns
    assert engine.stats_at_stop[VERIFIER].num_received == 2000


def test_tensors_cross_processes_and_stale_ones_are_refused():
    settings = Settings(num_slots=4)
    stages = {SPECULATOR: "TensorWriter", PREDICTOR: "TensorReader"}
    with supervise(stages, settings) as engine:
        for number in range(10):
            engine.send(SPECULATOR, Item(number=number))
            (item,) = collect(engine, 1)
            assert item == Item(number=number, text=f"(8, 1000) {number}..{number}")
        engine.send(SPECULATOR, Item(number=10, text="overrun"))
        assert collect(engine, 1) == [Item(number=10, text="stale")]
        assert engine.stats()[PREDICTOR].num_refused == 1
        engine.send(SPECULATOR, Item(number=11))
        assert collect(engine, 1) == [Item(number=11, text="(8, 1000) 11..11")]


def test_shared_memory_has_no_name_once_everybody_is_connected():
    with supervise({SPECULATOR: "TensorWriter", PREDICTOR: "TensorReader"}):
        assert not [path for path in traces() if path.startswith("/dev/shm")]


def test_a_stage_carries_its_name_runs_on_its_cores_and_has_its_threads():
    core = min(os.sched_getaffinity(0))
    spec = toy(VERIFIER, "Describe", cores=(core,), threads=3)
    with Supervisor([spec], b"\x80", frontend_accepts=Item) as engine:
        engine.send(VERIFIER, Item(number=0))
        (item,) = collect(engine, 1)
        command = Path(f"/proc/{item.number}/cmdline").read_text().split("\0")
    assert item.text == f"target-verifier cores=[{core}] omp=3"
    assert command[3:5] == ["pipeline.process", "target-verifier"]
    assert not is_alive(item.number)


def test_signals_to_the_frontends_process_group_or_terminal_do_not_reach_a_stage():
    with supervise({TOKENIZER: "Echo", VERIFIER: "Echo"}) as engine:
        for pid in engine.pids.values():
            assert os.getpgid(pid) == pid
            assert os.getsid(pid) == os.getsid(0)


def test_a_lost_terminal_does_not_end_a_stage():
    with supervise({TOKENIZER: "Echo"}) as engine:
        os.kill(engine.pids[TOKENIZER], signal.SIGHUP)
        engine.send(TOKENIZER, Item(number=1))
        assert collect(engine, 1) == [Item(number=1)]


def test_an_unknown_log_level_is_not_said_by_every_stage_once_more(capfd, monkeypatch):
    monkeypatch.setenv("SSD_LOG", "loud")
    with supervise({TOKENIZER: "Echo", VERIFIER: "Echo"}):
        pass
    assert capfd.readouterr().err == ""


def test_background_work_runs_while_no_message_waits():
    with supervise({TOKENIZER: "Worker"}) as engine:
        engine.send(TOKENIZER, Item(number=3))
        assert [item.number for item in collect(engine, 3)] == [2, 1, 0]


def test_a_refused_message_is_counted_and_the_stage_goes_on():
    with supervise({TOKENIZER: "Echo", VERIFIER: "Relay"}) as engine:
        engine.send(VERIFIER, Item(number=-1))
        engine.send(VERIFIER, Item(number=1))
        assert [item.number for item in collect(engine, 1)] == [1]
        assert engine.stats()[VERIFIER].num_refused == 1


def test_two_engines_at_once_do_not_meet():
    with supervise({TOKENIZER: "Echo"}) as one, supervise({TOKENIZER: "Echo"}) as other:
        one.send(TOKENIZER, Item(number=1))
        other.send(TOKENIZER, Item(number=2))
        assert collect(one, 1) == [Item(number=1)]
        assert collect(other, 1) == [Item(number=2)]
        assert len(traces()) == 2
    assert not traces()


def test_stop_is_quick_may_be_called_twice_and_later_use_is_refused():
    engine = supervise({TOKENIZER: "Echo", SPECULATOR: "TensorWriter", PREDICTOR: "TensorReader"})
    engine.start()
    pids = engine.pids.values()
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < 1.5
    engine.stop()
    assert not traces()
    assert not any(map(is_alive, pids))
    with pytest.raises(EngineDead, match="the engine was stopped"):
        engine.send(TOKENIZER, Item(number=1))
    with pytest.raises(EngineDead, match="the engine was stopped"):
        engine.poll(0)


def test_a_library_that_crashes_at_the_end_of_the_interpreter_is_not_seen(capfd):
    with supervise({TOKENIZER: "CrashesAtExit"}) as engine:
        engine.send(TOKENIZER, Item(number=1))
        assert collect(engine, 1) == [Item(number=1)]
    with pytest.raises(ConfigError, match=r"toy\.size=3"):
        supervise({TOKENIZER: "RefusesSettingsAndCrashesAtExit"}).start()
    assert capfd.readouterr().err == ""


def test_use_before_the_start_is_refused():
    with pytest.raises(EngineDead, match="not started"):
        supervise({TOKENIZER: "Echo"}).send(TOKENIZER, Item(number=1))


def test_a_stage_that_does_not_listen_is_ended_within_five_seconds():
    engine = supervise({TOKENIZER: "Deaf", VERIFIER: "Echo"})
    engine.start()
    engine.send(TOKENIZER, Item(number=1))
    collect(engine, 1)
    (pid,) = [engine.pids[TOKENIZER]]
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < 5
    assert not is_alive(pid)
    assert not traces()


def test_a_user_error_in_setup_arrives_as_it_was_written():
    stages = {TOKENIZER: "Echo", VERIFIER: "RefusesSettings", SPECULATOR: "NeverReady"}
    began = time.monotonic()
    expected = "toy.size=3: expected an even number; change it to 2 or 4"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"), supervise(stages):
        pass
    assert time.monotonic() - began < 5
    assert not traces()
    assert not children()


def test_a_crash_in_setup_names_the_stage_and_shows_its_traceback():
    with (
        pytest.raises(EngineDead) as error,
        supervise({TOKENIZER: "Echo", VERIFIER: "CrashesInSetup"}),
    ):
        pass
    first, second, *_ = str(error.value).splitlines()
    assert re.fullmatch(
        r"stage lost: target-verifier \(pid \d+\) failed with ZeroDivisionError: toy crash in setup", first
    )
    assert second.startswith("Traceback")
    assert not traces()


def test_a_factory_that_does_not_exist_names_the_stage():
    with (
        pytest.raises(EngineDead, match=r"(?s)tokenizer .*no attribute 'NoSuchStage'"),
        supervise({TOKENIZER: "NoSuchStage"}),
    ):
        pass


def test_a_stage_killed_while_it_loads_leaves_no_shared_memory():
    with (
        pytest.raises(EngineDead, match=r"draft-speculator .* was killed by SIGKILL"),
        supervise({SPECULATOR: "DiesInSetup", PREDICTOR: "TensorReader"}),
    ):
        pass
    assert not traces()


def test_a_stage_that_loads_too_long_is_named():
    stages = {TOKENIZER: "Echo", VERIFIER: "NeverReady"}
    with (
        pytest.raises(EngineDead, match=r"^target-verifier took over 1 s to load"),
        supervise(stages, load_timeout_s=1.0),
    ):
        pass
    assert not traces()


def test_a_crash_while_running_names_the_stage_and_shows_its_traceback():
    engine = supervise({TOKENIZER: "Echo", DETOKENIZER: "Crashing"})
    engine.start()
    engine.send(DETOKENIZER, Item(number=7))
    with pytest.raises(EngineDead, match=r"(?s)detokenizer .* failed with Zero.*Traceback.*toy crash at 7"):
        collect(engine, 1)
    assert not traces()
    with pytest.raises(EngineDead, match="toy crash at 7"):
        engine.send(TOKENIZER, Item(number=1))


def test_a_receiver_that_does_not_keep_up_is_named_instead_of_blocking():
    with supervise({TOKENIZER: "Deaf"}, high_water_mark=50) as engine:
        engine.send(TOKENIZER, Item(number=0))
        collect(engine, 1)
        item = Item(number=1, text="x" * 10_000)
        with pytest.raises(EngineDead, match=r"tokenizer does not keep up: over 50 messages from frontend"):
            collections.deque((engine.send(TOKENIZER, item) for _ in range(100_000)), maxlen=0)


def test_an_overflow_between_stages_ends_the_run_and_names_the_receiver():
    settings = Settings(receiver=VERIFIER, copies=100_000)
    with supervise({TOKENIZER: "Relay", VERIFIER: "Deaf"}, settings, high_water_mark=50) as engine:
        engine.send(TOKENIZER, Item(number=0, text="x" * 10_000))
        with pytest.raises(EngineDead, match=r"(?s)tokenizer .*target-verifier does not keep up"):
            collect(engine, 2)


def test_a_receiver_outside_the_run_is_a_bug_that_names_both_ends():
    with supervise({TOKENIZER: "Relay"}, Settings(receiver=VERIFIER)) as engine:
        engine.send(TOKENIZER, Item(number=0))
        with pytest.raises(EngineDead, match="tokenizer sent Item to target-verifier, which is not part"):
            collect(engine, 1)


def test_a_message_of_a_type_that_a_stage_does_not_accept_is_dropped_and_counted():
    with supervise({TOKENIZER: "Echo", PREDICTOR: "TensorReader", SPECULATOR: "TensorWriter"}) as engine:
        engine.send(PREDICTOR, Item(number=1))
        engine.send(SPECULATOR, Item(number=2))
        assert collect(engine, 1) == [Item(number=2, text="(8, 1000) 2..2")]
        # Its two senders have a socket each: the first message may be read after the second.
        deadline = time.monotonic() + 10
        while engine.stats()[PREDICTOR].num_received < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats()[PREDICTOR].num_dropped == 1
        assert TensorItem not in {type(message) for message in engine.poll(0)}


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([], "at least one"),
        ([toy(TOKENIZER, "Echo"), toy(TOKENIZER, "Echo")], "at most once"),
        ([toy(FRONTEND, "Echo")], "frontend"),
        ([toy(TOKENIZER, "os.system('')")], "package.module:function"),
        ([toy(TOKENIZER, "Echo", cores=(100_000,))], "expected some of the cores"),
        ([toy(TOKENIZER, "Echo", threads=0)], "at least 1 thread"),
    ],
)
def test_a_topology_that_cannot_run_is_refused_before_anything_starts(stages, reason):
    with pytest.raises(ConfigError, match=reason):
        Supervisor(stages, b"")


def test_too_low_a_limit_of_open_files_is_refused_before_anything_starts():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"40 open files, expected at least \d+; .*ulimit -n"):
            supervise({TOKENIZER: "Echo"}).start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not children()
    assert not traces()


def test_a_process_that_cannot_be_started_is_named(monkeypatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(EngineDead, match=r"tokenizer cannot be started: .*/no/such/python"):
        supervise({TOKENIZER: "Echo"}).start()
    assert not traces()


def test_starting_and_stopping_often_leaves_nothing_open():
    def start_and_stop() -> None:
        with supervise({SPECULATOR: "TensorWriter", PREDICTOR: "TensorReader"}) as engine:
            engine.send(SPECULATOR, Item(number=1))
            collect(engine, 1)

    start_and_stop()
    before = (open_files(), children(), traces())
    for _ in range(10):
        start_and_stop()
    assert (open_files(), children(), traces()) == before
    assert not before[1]
    assert not before[2]
