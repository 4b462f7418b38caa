"""Profiles of a whole engine: what they consist of, and how another process asks a running one for them.

Every engine listens on the socket `profile` in its run directory, which only its user can reach. An answer
comes while the engine's owner polls it. Frames that are no request are counted, logged and dropped.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from pipeline.control import EndProfile, ProfileStarted, StageProfile, StartProfile
from pipeline.errors import EngineDead, RequestError
from pipeline.log import WarnOnce, get_logger
from pipeline.mailbox import can_receive
from pipeline.messages import StageName
from pipeline.run_directory import ipc_address, live_runs

SOCKET_NAME = "profile"
_ANSWER_S = 120.0
"""A stage answers between two forwards, and may have a long trace to hand over."""
_LOOK_MS = 500
"""How often who waits for an answer looks whether the engine is still there."""

_log = get_logger(__name__)


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What all stages of an engine recorded, the frontend included."""

    settings: bytes
    """The run's configuration, msgpack bytes."""
    pids: dict[StageName, int]
    stages: dict[StageName, StageProfile]


class ProfileRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The engine goes on, but what was asked for cannot be had."""

    reason: str


ToProfiler = ProfileStarted | EngineProfile | ProfileRefused


class ProfileServer:
    """The engine's end: takes requests, one at a time, and answers them.

    num_dropped: frames that were no request.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_directory: Path) -> None:
        self.num_dropped = 0
        self._decoder = msgspec.msgpack.Decoder(StartProfile | EndProfile)
        self._warn_once = WarnOnce(_log)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ipc_address(run_directory / SOCKET_NAME))

    def receive(self) -> tuple[bytes, StartProfile | EndProfile] | None:
        """Who asks, and for what; None when nobody does. Never blocks, never raises."""
        while can_receive(self.socket):
            frames = self.socket.recv_multipart(zmq.DONTWAIT)
            try:
                client, payload = frames
                return client, self._decoder.decode(payload)
            except (ValueError, RecursionError) as error:
                self.num_dropped += 1
                self._warn_once("request", "dropped what arrived on the profile socket: %r", error)
        return None

    def answer(self, client: bytes, message: ToProfiler) -> None:
        """Send; what a client that is gone should get is lost."""
        self.socket.send_multipart([client, msgspec.msgpack.encode(message)], zmq.DONTWAIT)

    def close(self) -> None:
        """Unbind. May be called twice."""
        self.socket.close()


class ProfileClient:
    """The other end: profiles a running engine from another process. A context manager."""

    def __init__(self, run_directory: Path) -> None:
        """run_directory: of the engine, see `pipeline.run_directory`."""
        self._run_directory = run_directory
        self._name = run_directory.name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(ipc_address(run_directory / SOCKET_NAME))
        self._decoder = msgspec.msgpack.Decoder(ToProfiler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def start(self, *, num_spans: int, traces_kernels: bool) -> None:
        """Return when all stages record.

        Raises `EngineDead` when the engine does not answer, and `RequestError` when it says no.
        """
        answer = self._ask(StartProfile(num_spans=num_spans, traces_kernels=traces_kernels))
        if not isinstance(answer, ProfileStarted):
            raise EngineDead(f"expected ProfileStarted of {self._name}, got {type(answer).__name__}")

    def end(self) -> EngineProfile:
        """What was recorded since `start`. Raises like `start`."""
        answer = self._ask(EndProfile())
        if not isinstance(answer, EngineProfile):
            raise EngineDead(f"expected EngineProfile of {self._name}, got {type(answer).__name__}")
        return answer

    def _ask(self, message: StartProfile | EndProfile) -> ProfileStarted | EngineProfile:
        self._socket.send(msgspec.msgpack.encode(message))
        self._wait_for_answer()
        try:
            answer: ToProfiler = self._decoder.decode(self._socket.recv())
        except msgspec.MsgspecError as error:
            raise EngineDead(f"the engine {self._name} speaks another version of this: {error}") from None
        if isinstance(answer, ProfileRefused):
            raise RequestError(answer.reason)
        return answer

    def _wait_for_answer(self) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while not self._socket.poll(_LOOK_MS):
            if self._run_directory not in live_runs(self._run_directory.parent):
                raise EngineDead(f"the engine {self._name} has ended, and its profile with it")
            if time.monotonic() > deadline:
                raise EngineDead(f"the engine {self._name} did not answer within {_ANSWER_S:g} s")
