"""Starts the stage processes, carries the frontend's mail, notices a lost stage, and stops them all.

Owns processes, addresses and the run directory; knows nothing about models. One thread uses it.

    spawn -> Hello -> Start -> setup -> Ready -> Connect -> Connected -> running -> Stop -> Stopped

Each step has a time limit whose error names the stage. A stage that ends while running ends the run: the
rest is stopped, and `EngineDead` names it, with its traceback if it sent one. Nothing is left behind: no
process, no run directory, no shared memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from pipeline.child import StageChild
from pipeline.control import (
    Connect,
    Connected,
    ControlServer,
    EndProfile,
    Hello,
    ProfileStarted,
    Ready,
    ReportStats,
    StageFailed,
    StageProfile,
    StageStats,
    Start,
    StartProfile,
    Stop,
    Stopped,
    ToStage,
)
from pipeline.errors import ConfigError, EngineDead, RequestError
from pipeline.log import get_logger
from pipeline.mailbox import HIGH_WATER_MARK, Inbox, MailOutbox
from pipeline.messages import FrontendMessage, Message, StageName
from pipeline.profiling import EngineProfile, ProfileRefused, ProfileServer, ToProfiler
from pipeline.run_directory import RunDirectory, runtime_root
from pipeline.spans import SpanRecorder
from pipeline.topology import StageSpec, check_topology

_WATCH_S = 0.1
"""How long at most until a lost stage is noticed."""
_LAST_WORDS_S = 0.1
"""How long to wait for the traceback of a lost stage, and for others that fell with it."""
_PROFILE_S = 60.0
"""How long a stage may take to begin or end its profile: it answers between two forwards."""
_READERS_STOP_S = 1.0
_TERMINATE_AFTER_S = 2.0
_KILL_AFTER_S = 3.0
_MIN_OPEN_FILES = 64
"""What a process of the run may need, at least; ZeroMQ ends or hangs a process that runs out."""

_log = get_logger(__name__)
_Step = TypeVar("_Step", Hello, Ready, Connected)
_ProfileAnswer = TypeVar("_ProfileAnswer", ProfileStarted, StageProfile)


class Supervisor:
    """The processes of one run. A context manager: enter starts, leave stops.

    stats_at_stop: the last figures of each stage that could still tell, after `stop`.
    """

    def __init__(
        self,
        topology: Sequence[StageSpec],
        settings: bytes,
        *,
        frontend_accepts: Any = FrontendMessage,
        load_timeout_s: float = 600.0,
        step_timeout_s: float = 60.0,
        high_water_mark: int = HIGH_WATER_MARK,
    ) -> None:
        """Store what to run. Raises `ConfigError` for a topology that cannot.

        settings: handed to every stage as it is.
        load_timeout_s: limit for `Stage.setup`, that is loading models.
        step_timeout_s: limit for every other step of the start.
        """
        check_topology(topology)
        self.stats_at_stop: dict[StageName, StageStats] = {}
        self._topology = tuple(topology)
        self._settings = settings
        self._frontend_accepts = frontend_accepts
        self._load_timeout_s = load_timeout_s
        self._step_timeout_s = step_timeout_s
        self._high_water_mark = high_water_mark
        self._children: dict[StageName, StageChild] = {}
        self._directory: RunDirectory | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._control: ControlServer | None = None
        self._profiler: ProfileServer | None = None
        self._profiling_client: bytes | None = None
        """Who attached last, and has not ended its profile."""
        self._spans = SpanRecorder()
        self._inbox: Inbox | None = None
        self._outbox: MailOutbox | None = None
        self._poller = zmq.Poller()
        self._wakes: zmq.Socket[bytes] | None = None
        self._lifeline: int | None = None
        self._end_reason: str | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pids(self) -> dict[StageName, int]:
        """The process of each stage."""
        return {name: child.pid for name, child in self._children.items()}

    def start(self) -> None:
        """Start all stages, in parallel, and return when all are running.

        Raises `ConfigError` with the text of a stage that raised one, and `EngineDead` when one fails
        otherwise or takes too long; everything is stopped then.
        """
        try:
            addresses, epoch = self._open()
            self._handshake(addresses, epoch)
        except BaseException as error:
            self.stop(reason=str(error))
            raise

    def send(self, receiver: StageName, message: Message) -> None:
        """Queue a message from the frontend. Raises `EngineDead` after the end, or when it overflows."""
        if self._outbox is None:
            raise EngineDead(self._end_reason or "the engine is not started")
        self._outbox.send(receiver, message)

    def poll(self, timeout_s: float) -> list[Any]:
        """Messages for the frontend, waiting up to `timeout_s` for the first; an empty list if none came.

        Raises `EngineDead` when a stage was lost: everything is stopped then.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # What a stage says too late must not keep the poller awake.
            self._wait_for_control(0)
            self._raise_if_lost()
            self._answer_profiler()
            messages = self._take_mail()
            remaining = deadline - time.monotonic()
            if messages or remaining <= 0:
                return messages
            ready = self._poller.poll(max(1, int(1000 * min(remaining, _WATCH_S))))
            if self._wakes in (socket for socket, _ in ready):
                return self._take_mail()

    def wake_on(self, socket: zmq.Socket[bytes]) -> None:
        """Let `poll` return early, with or without messages, when something waits on `socket`."""
        self._wakes = socket
        self._poller.register(socket, zmq.POLLIN)

    def stats(self, timeout_s: float = 1.0) -> dict[StageName, StageStats]:
        """Current figures of each stage; one that is too busy to answer in time shows its previous ones.

        Raises `EngineDead` like `poll`.
        """
        self._raise_if_lost()
        before = {name: child.stats for name, child in self._children.items()}
        for name in self._children:
            self._tell(name, ReportStats())
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(child.stats is not before[name] for name, child in self._children.items()):
                break
            self._wait_for_control(min(_WATCH_S, deadline - time.monotonic()))
            self._raise_if_lost()
        return {name: child.stats for name, child in self._children.items() if child.stats is not None}

    def start_profile(self, *, num_spans: int, traces_kernels: bool = False) -> None:
        """Let all stages record spans; return when they do. A profile that is on already begins anew.

        num_spans, traces_kernels: see `StartProfile`. Raises `EngineDead` like `poll`, and `RequestError`
        when a stage does not answer in time.
        """
        command = StartProfile(num_spans=num_spans, traces_kernels=traces_kernels)
        self._spans.start(num_spans=num_spans, now_ns=time.monotonic_ns())
        self._ask_for_profile(command, ProfileStarted)

    def end_profile(self) -> EngineProfile:
        """What all stages recorded, the frontend included; they record nothing more.

        Raises like `start_profile`.
        """
        stages = self._ask_for_profile(EndProfile(), StageProfile)
        frontend = self._spans.dump(now_ns=time.monotonic_ns())
        self._spans.stop()
        return EngineProfile(
            settings=self._settings,
            pids={StageName.FRONTEND: os.getpid(), **self.pids},
            stages={StageName.FRONTEND: StageProfile(spans=frontend, kernel_trace=None), **stages},
        )

    def stop(self, reason: str = "the engine was stopped") -> None:
        """Stop all stages, those that export pools last, within 5 seconds. May be called twice.

        Interrupted by a second Ctrl-C, it kills what is left.
        """
        if self._end_reason is None:
            self._end_reason = reason
        try:
            self._stop_children()
        finally:
            self._kill_children()
            self._close()

    # --- start ----------------------------------------------------------------------------------------

    def _open(self) -> tuple[dict[StageName, str], int]:
        """Make the run directory and the sockets, and spawn; the addresses and the epoch of this run."""
        _check_open_files()
        directory = self._directory = RunDirectory(runtime_root())
        names = [StageName.FRONTEND, *(spec.name for spec in self._topology)]
        addresses = {name: directory.address(name.value) for name in names}
        epoch = secrets.randbits(62)
        context = self._context = zmq.Context(io_threads=1)
        self._control = ControlServer(context, directory.address("control"))
        self._profiler = ProfileServer(context, directory.path)
        stages: dict[StageName, str] = {
            name: address for name, address in addresses.items() if name is not StageName.FRONTEND
        }
        self._inbox = Inbox(
            context,
            addresses[StageName.FRONTEND],
            accepts=self._frontend_accepts,
            senders=stages,
            epoch=epoch,
            high_water_mark=self._high_water_mark,
            spans=self._spans,
        )
        self._outbox = MailOutbox(
            context,
            stages,
            sender=StageName.FRONTEND,
            epoch=epoch,
            high_water_mark=self._high_water_mark,
            spans=self._spans,
        )
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._control.socket, zmq.POLLIN)
        self._poller.register(self._profiler.socket, zmq.POLLIN)
        # Nobody writes to this pipe: its end tells the stages that we are gone.
        lifeline, self._lifeline = os.pipe()
        try:
            for spec in self._topology:
                self._children[spec.name] = StageChild(
                    spec, directory.address("control"), directory.path, lifeline
                )
        finally:
            os.close(lifeline)
        return addresses, epoch

    def _handshake(self, addresses: dict[StageName, str], epoch: int) -> None:
        for child, _ in self._each(Hello, self._step_timeout_s, "to say Hello"):
            start = Start(
                factory=child.spec.factory,
                settings=self._settings,
                addresses=addresses,
                epoch=epoch,
                high_water_mark=self._high_water_mark,
            )
            self._tell(child.spec.name, start)
        for child, ready in self._each(Ready, self._load_timeout_s, "to load (load_timeout_s)"):
            child.exports = ready.exports
        self._check_exports()
        for name in self._children:
            pools = [e for other, c in self._children.items() if other is not name for e in c.exports]
            self._tell(name, Connect(pools=pools))
        for child, _ in self._each(Connected, self._step_timeout_s, "to connect"):
            child.is_running = True
        self._unlink_pools()

    def _each(self, step: type[_Step], limit_s: float, purpose: str) -> Iterator[tuple[StageChild, _Step]]:
        """Each child with its answer to one step, as they come."""
        missing = dict(self._children)
        deadline = time.monotonic() + limit_s
        while missing:
            # A fast stage may be a step ahead of the slowest: look at all it has said.
            for name, child in list(missing.items()):
                answer = child.said.get(step)
                if isinstance(answer, step):
                    del missing[name]
                    yield child, answer
            if missing:
                self._wait_for_control(_WATCH_S)
            self._raise_if_lost()
            if missing and time.monotonic() > deadline:
                names = ", ".join(name.value for name in missing)
                raise EngineDead(f"{names} took over {limit_s:g} s {purpose}; the run is stopped")

    def _check_exports(self) -> None:
        names = [export.spec.name for child in self._children.values() for export in child.exports]
        if len(set(names)) != len(names):
            raise EngineDead(f"expected every pool name once, got {sorted(names)}")

    def _unlink_pools(self) -> None:
        """Every reader has mapped them: from here on they live without a name."""
        for child in self._children.values():
            for export in child.exports:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(export.path)

    # --- while running --------------------------------------------------------------------------------

    def _take_mail(self) -> list[Any]:
        messages = []
        while self._inbox is not None and (received := self._inbox.receive()) is not None:
            messages.append(received[1])
        return messages

    def _answer_profiler(self) -> None:
        """Do what another process asks for. The owner's mail waits so long; the stages go on.

        Who attaches takes over from whoever did before, since that one may be gone without a word; if it is
        not, it hears of it at its own end, and gets none of the other's spans.
        """
        while self._profiler is not None and (request := self._profiler.receive()) is not None:
            client, command = request
            answer: ToProfiler = ProfileStarted()
            try:
                if isinstance(command, EndProfile):
                    if client != self._profiling_client:
                        raise RequestError(
                            "another profiler attached in the meantime, and what was recorded before it is "
                            "lost; attach again, one at a time"
                        )
                    self._profiling_client = None
                    answer = self.end_profile()
                else:
                    self._profiling_client = client
                    self.start_profile(num_spans=command.num_spans, traces_kernels=command.traces_kernels)
            except RequestError as error:
                answer = ProfileRefused(reason=str(error))
            self._profiler.answer(client, answer)

    def _ask_for_profile(
        self, command: StartProfile | EndProfile, expected: type[_ProfileAnswer]
    ) -> dict[StageName, _ProfileAnswer]:
        """What each stage answers."""
        self._raise_if_lost()
        for name, child in self._children.items():
            child.profile = None
            self._tell(name, command)
        deadline = time.monotonic() + _PROFILE_S
        while True:
            answers = {
                name: child.profile
                for name, child in self._children.items()
                if isinstance(child.profile, expected)
            }
            missing = [name.value for name in self._children if name not in answers]
            if not missing:
                return answers
            if time.monotonic() > deadline:
                raise RequestError(
                    f"{', '.join(missing)} did not answer {type(command).__name__} within {_PROFILE_S:g} s; "
                    "ask again when it has done what it is at"
                )
            self._wait_for_control(_WATCH_S)
            self._raise_if_lost()

    def _tell(self, name: StageName, message: ToStage) -> None:
        # A stage that cannot take it is gone, or about to be found out by a time limit.
        if self._control is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._control.send(name, message)

    def _wait_for_control(self, timeout_s: float) -> None:
        """Note what the stages say, waiting up to `timeout_s` for the first word."""
        if self._control is None:
            return
        self._control.socket.poll(max(0, int(1000 * timeout_s)))
        for name, message in self._control.receive():
            child = self._children.get(name)
            if child is None:
                continue
            if isinstance(message, StageFailed):
                child.failure = message
            elif isinstance(message, StageStats):
                child.stats = message
            elif isinstance(message, ProfileStarted | StageProfile):
                child.profile = message
            elif isinstance(message, Stopped):
                child.stats = message.stats or child.stats
            else:
                child.said[type(message)] = message

    def _raise_if_lost(self) -> None:
        if self._control is None:
            raise EngineDead(self._end_reason or "the engine is not started")
        if not any(child.has_ended or child.failure for child in self._children.values()):
            return
        self._hear_last_words()
        user_errors = [c.failure for c in self._children.values() if c.failure and c.failure.is_user_error]
        reason = user_errors[0].reason if user_errors else _describe_loss(self._children.values())
        self.stop(reason=reason)
        raise ConfigError(reason) if user_errors else EngineDead(reason)

    def _hear_last_words(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS_S
        while (remaining := deadline - time.monotonic()) > 0:
            self._wait_for_control(remaining)

    # --- stop -----------------------------------------------------------------------------------------

    def _stop_children(self) -> None:
        """Readers of pools first, then exporters; SIGTERM to what is still there after a while."""
        began = time.monotonic()
        running = [child for child in self._children.values() if child.is_running]
        for child in self._children.values():
            if not child.is_running:
                # It may be in the middle of loading, where it hears no message.
                child.terminate()
        exporters = [child for child in running if child.exports]
        self._stop_some([child for child in running if not child.exports], began + _READERS_STOP_S)
        self._stop_some(exporters, began + _TERMINATE_AFTER_S)
        for child in running:
            if not child.has_ended:
                _log.warning("%s did not stop when told to; terminating it", child.spec.name.value)
                child.terminate()
        for child in self._children.values():
            child.wait(began + _KILL_AFTER_S - time.monotonic())

    def _stop_some(self, children: Sequence[StageChild], deadline: float) -> None:
        for child in children:
            self._tell(child.spec.name, Stop())
        while not all(child.has_ended for child in children) and time.monotonic() < deadline:
            self._wait_for_control(0.005)
        self._wait_for_control(0)

    def _kill_children(self) -> None:
        for child in self._children.values():
            if not child.has_ended:
                child.kill()
        for name, child in self._children.items():
            child.wait(1.0)
            if child.stats is not None:
                self.stats_at_stop[name] = child.stats

    def _close(self) -> None:
        for end in (self._inbox, self._outbox, self._control, self._profiler):
            if end is not None:
                end.close()
        self._inbox = self._outbox = self._control = self._profiler = None
        self._poller = zmq.Poller()
        self._wakes = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
        self._children = {}


def _check_open_files() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _MIN_OPEN_FILES:
        raise ConfigError(
            f"a process may have {limit} open files, expected at least {_MIN_OPEN_FILES}; raise the limit "
            "(ulimit -n 1024)"
        )


def _describe_loss(children: Iterable[StageChild]) -> str:
    """Which stages failed or ended, and how; those that a signal ended first: they cause, never follow."""
    lost = sorted(
        (child for child in children if child.has_ended or child.failure),
        key=lambda child: (not child.was_killed(), child.failure is None),
    )
    lines = []
    for child in lost:
        who = f"{child.spec.name.value} (pid {child.pid})"
        if child.failure is None:
            lines.append(f"{who} {child.describe_end()}")
        else:
            lines += [f"{who} failed with {child.failure.reason}", child.failure.traceback.rstrip()]
    return "stage lost: " + "\n".join(lines)
