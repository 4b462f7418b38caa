"""The entry point of a stage process: `python -m pipeline.process STAGE CONTROL_ADDRESS ...`.

Turns a `Stage` into a process: says Hello, builds and sets up the stage when told to Start, maps the
pools it is told to Connect, then receives, handles and works until told to Stop. Started by
`pipeline.supervisor` only; knows nothing about what the stage does.

The process does not outlive its supervisor: its stdin is a pipe that only the supervisor holds open, and
a small thread waits for its end. (PR_SET_PDEATHSIG would fire when the *thread* that started us ends.)
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

import zmq

from pipeline.control import (
    Connect,
    Connected,
    ControlClient,
    EndProfile,
    Hello,
    Ready,
    ReportStats,
    StageFailed,
    StageStats,
    Start,
    StartProfile,
    Stop,
    Stopped,
    unexpected,
)
from pipeline.errors import ConfigError, ProtocolError
from pipeline.log import WarnOnce, configure_logging, get_logger
from pipeline.mailbox import Inbox, MailOutbox, can_receive
from pipeline.messages import StageName
from pipeline.run_directory import remove_run
from pipeline.shm_memory import SharedMemoryExporter, SharedMemoryReader
from pipeline.spans import SpanKind
from pipeline.stage import Stage, StageContext
from pipeline.stage_profile import ProfileSwitch
from pipeline.standard_streams import open_missing_streams

_WAIT_MS = 500
_BURST = 64
"""Messages handled before the control channel is looked at again."""
_EXIT_TERMINATED = 128 + signal.SIGTERM
"""Status after SIGTERM, as shells show it."""

_log = get_logger(__name__)


class _StopRequested(Exception):
    """Told to stop before the stage was running."""


class StageRunner:
    """The life of one stage in this process: `run` returns its exit status."""

    def __init__(
        self,
        name: StageName,
        control_address: str,
        run_directory: Path,
        *,
        io_cores: Sequence[int] = (),
        busy_poll_us: int = 0,
    ) -> None:
        """io_cores, busy_poll_us: see `StageSpec`."""
        self._name = name
        self._busy_poll_ns = busy_poll_us * 1000
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        for core in io_cores:  # before the first socket, which starts the thread
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._control = ControlClient(self._context, control_address, name)
        self._exporter = SharedMemoryExporter(run_directory, name.value)
        self._reader = SharedMemoryReader()
        self._poller = zmq.Poller()
        self._warn_once = WarnOnce(_log)
        self._profile = ProfileSwitch()
        self._spans = self._profile.spans
        self._stage: Stage | None = None
        self._inbox: Inbox | None = None
        self._outbox: MailOutbox | None = None
        self._must_stop = False
        self._num_refused = 0
        self._busy_ns = 0
        self._is_running = False

    def run(self) -> int:
        """Start, run and close the stage. A failure is reported to the supervisor, not raised."""
        status = 1
        try:
            self._control.send(Hello(pid=os.getpid()))
            stage, inbox = self._set_up()
            self._connect(stage)
            signal.signal(signal.SIGTERM, _terminate)
            self._loop(stage, inbox)
            status = 0
        except _StopRequested:
            status = 0
        except ConfigError as error:
            self._control.send(StageFailed(is_user_error=True, reason=str(error)))
        except Exception as error:
            self._control.send(_failure(error))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._close()
        return status

    def _set_up(self) -> tuple[Stage, Inbox]:
        start = self._next_control()
        if not isinstance(start, Start):
            raise unexpected(start, "Start")
        self._outbox = MailOutbox(
            self._context,
            {name: address for name, address in start.addresses.items() if name is not self._name},
            sender=self._name,
            epoch=start.epoch,
            high_water_mark=start.high_water_mark,
            spans=self._spans,
        )
        context = StageContext(
            outbox=self._outbox, pools=self._exporter, settings=start.settings, spans=self._spans
        )
        stage = self._stage = _import_factory(start.factory)(context)
        stage.setup()
        inbox = self._inbox = Inbox(
            self._context,
            start.addresses[self._name],
            accepts=stage.accepts,
            senders=[name for name in start.addresses if name is not self._name],
            epoch=start.epoch,
            high_water_mark=start.high_water_mark,
            spans=self._spans,
        )
        self._control.send(Ready(exports=self._exporter.exports))
        return stage, inbox

    def _connect(self, stage: Stage) -> None:
        connect = self._next_control()
        if not isinstance(connect, Connect):
            raise unexpected(connect, "Connect")
        stage.connect({export.spec.name: self._reader.attach(export) for export in connect.pools})
        self._control.send(Connected())

    def _loop(self, stage: Stage, inbox: Inbox) -> None:
        """Handle everything that waits, else work, else sleep."""
        self._poller.register(inbox.socket, zmq.POLLIN)
        self._poller.register(self._control.socket, zmq.POLLIN)
        # What was loaded stays: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()
        self._is_running = True
        while not self._must_stop:
            if not (self._handle_waiting(stage, inbox) or self._work(stage)):
                self._wait(inbox)
            self._answer_control(stage)

    def _wait(self, inbox: Inbox) -> None:
        """Return when there may be news: watch the inbox for a while, then sleep."""
        began_ns = time.monotonic_ns()
        end_ns = began_ns + self._busy_poll_ns
        has_news = False
        while not has_news and time.monotonic_ns() < end_ns:
            has_news = can_receive(inbox.socket)
        if not has_news:
            self._poller.poll(_WAIT_MS)
        if self._spans.is_on:
            self._spans.add(SpanKind.WAIT, began_ns, time.monotonic_ns())

    def _handle_waiting(self, stage: Stage, inbox: Inbox) -> bool:
        """Handle what waits in the inbox, at most a burst; whether there was anything."""
        for count in range(_BURST):
            received = inbox.receive()
            if received is None:
                return count > 0
            sender, message = received
            began_ns = time.monotonic_ns()
            try:
                stage.handle(message)
            except ProtocolError as error:
                self._num_refused += 1
                kind = type(message).__name__
                self._warn_once(
                    f"{kind} {type(error).__name__}",
                    "refused %s from %s: %s (said once, counted always)",
                    kind,
                    sender.value,
                    error,
                )
            ended_ns = time.monotonic_ns()
            self._busy_ns += ended_ns - began_ns
            if self._spans.is_on:
                self._spans.add_message(
                    SpanKind.HANDLE, began_ns, ended_ns, message=message, peer=sender, sent_ns=0
                )
        return True

    def _work(self, stage: Stage) -> bool:
        began_ns = time.monotonic_ns()
        has_worked = stage.work()
        if has_worked:
            ended_ns = time.monotonic_ns()
            self._busy_ns += ended_ns - began_ns
            if self._spans.is_on:
                self._spans.add(SpanKind.WORK, began_ns, ended_ns)
        return has_worked

    def _answer_control(self, stage: Stage) -> None:
        message = self._control.receive()
        if message is None:
            return
        if isinstance(message, Stop):
            self._must_stop = True
        elif isinstance(message, ReportStats) and (stats := self._stats()) is not None:
            self._control.send(stats)
        elif isinstance(message, StartProfile | EndProfile):
            self._control.send(self._profile.take(message, stage))
        else:
            raise unexpected(message, "Stop, ReportStats, StartProfile or EndProfile")

    def _next_control(self) -> object:
        message = self._control.wait()
        if isinstance(message, Stop):
            raise _StopRequested
        return message

    def _stats(self) -> StageStats | None:
        if self._inbox is None or self._outbox is None or not self._is_running:
            return None
        return StageStats(
            num_received=self._inbox.num_received,
            num_sent=self._outbox.num_sent,
            num_dropped=self._inbox.num_dropped,
            num_refused=self._num_refused,
            num_late=0 if self._stage is None else self._stage.num_late_messages,
            busy_ns=self._busy_ns,
            transit_ns=self._inbox.transit_ns,
        )

    def _close(self) -> None:
        if self._stage is not None:
            try:
                self._stage.close()
            except Exception:
                _log.exception("closing the stage failed")
        self._reader.close()
        self._exporter.close()
        self._control.send(Stopped(stats=self._stats()))
        for end in (self._inbox, self._outbox, self._control):
            if end is not None:
                end.close()
        self._context.term()


def _failure(error: Exception) -> StageFailed:
    """What to tell of an error that is not the user's."""
    reason = " ".join("".join(traceback.format_exception_only(error)).split())
    return StageFailed(is_user_error=False, reason=reason, traceback=traceback.format_exc())


def _import_factory(factory: str) -> Callable[[StageContext], Stage]:
    module_name, _, function_name = factory.partition(":")
    return cast(Callable[[StageContext], Stage], getattr(importlib.import_module(module_name), function_name))


def _watch_supervisor(supervisor_pid: int, run_directory: Path) -> None:
    """End this process, and what the run left on disk, when the supervisor is gone."""

    def watch() -> None:
        try:
            while os.getppid() == supervisor_pid:
                readable, _, _ = select.select([sys.stdin.fileno()], [], [], _WAIT_MS / 1000)
                if readable and not os.read(sys.stdin.fileno(), 1):
                    break
            remove_run(run_directory)
        finally:
            # Whatever went wrong: nobody else would end this process.
            os._exit(1)

    threading.Thread(target=watch, name="watch-supervisor", daemon=True).start()


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Close the running stage and end."""
    raise SystemExit(_EXIT_TERMINATED)


def _terminate_at_once(signal_number: int, frame: FrameType | None) -> NoReturn:
    """End while the stage is being built, and leave the cleaning to the supervisor.

    Not by an exception: this may come inside a callback of native code (torch's import has some), which
    swallows it or aborts.
    """
    os._exit(_EXIT_TERMINATED)


def _take_place(name: str, cores: Sequence[int]) -> None:
    """Name the process and move it to its cores, where the system can do that; before any thread starts."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pipeline.process", description="One stage; see pipeline.supervisor."
    )
    parser.add_argument("stage", choices=[name.value for name in StageName if name is not StageName.FRONTEND])
    parser.add_argument("control_address")
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--supervisor-pid", type=int, required=True)
    parser.add_argument("--cores", type=int, nargs="*", default=[])
    parser.add_argument("--io-cores", type=int, nargs="*", default=[])
    parser.add_argument("--busy-poll-us", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run one stage to its end; its exit status."""
    open_missing_streams()
    # Should they reach a stage (it has a session of its own): what they mean is the supervisor's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate_at_once)
    faulthandler.enable()
    options = _parse(arguments)
    configure_logging(options.stage, refuses_aloud=False)
    _take_place(options.stage, options.cores)
    _watch_supervisor(options.supervisor_pid, options.run_directory)
    runner = StageRunner(
        StageName(options.stage),
        options.control_address,
        options.run_directory,
        io_cores=options.io_cores,
        busy_poll_us=options.busy_poll_us,
    )
    return runner.run()


def _end(status: int) -> NoReturn:
    """End this process now that the stage is closed, without the interpreter's own end.

    That one takes native libraries down in an order that they do not all survive: a stage that had refused
    its configuration was seen to crash there every other time, beside the line that says what to change.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        _end(main(sys.argv[1:]))
    except SystemExit as ended:  # by SIGTERM, or by arguments that are none
        _end(ended.code if isinstance(ended.code, int) else 1)
