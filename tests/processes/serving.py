"""Servers for tests: one with the fake engine in a thread, and the command line in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from conf.schema import RunConfig
from pipeline.errors import EngineDead
from pipeline.interrupts import Interrupts
from pipeline.listen_address import parse_listen
from pipeline.peers import Peers
from pipeline.serve import Server, listening
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0
"""Until an engine with models is ready, on a machine that does other things as well."""


@dataclass
class FakeServer:
    """A server in a thread."""

    address: str
    engine: FakeEngine
    interrupts: Interrupts
    thread: threading.Thread


@contextmanager
def fake_server(
    folder: Path, *, max_requests: int = 4, most_unsent: int = 10_000, config: RunConfig | None = None
) -> Iterator[FakeServer]:
    """Serve the fake engine at `folder/engine.sock` until the block ends."""
    config = config or RunConfig(max_requests=max_requests)
    config.model.path = "fake"
    interrupts = Interrupts()  # never entered: no signal comes, tests say that one has
    address = parse_listen(f"ipc://{folder / 'engine.sock'}", allow_remote=False)
    with listening(config, address) as (socket, text), FakeEngine(config) as engine:
        server = Server(engine, socket, config, peers=Peers(socket, most_unsent=most_unsent))

        def serve() -> None:
            with contextlib.suppress(EngineDead):  # as tests make it; clients are told
                server.run(interrupts)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield FakeServer(address=text, engine=engine, interrupts=interrupts, thread=thread)
        finally:
            stop(interrupts)
            thread.join()


def stop(interrupts: Interrupts) -> None:
    """Let a server believe that a signal came."""
    interrupts.received = signal.SIGTERM


class ServingProcess:
    """`python -m MODULE listen=... ARGUMENTS` in a process; a context manager that kills what is left.

    address: where it listens, once `wait_ready` returned.
    """

    def __init__(self, *arguments: str, module: str = "pipeline.run") -> None:
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self.address = ""
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServingProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def wait_ready(self) -> ServingProcess:
        """Wait for the line that says where it listens."""
        assert self._is_ready.wait(START_S), self.stderr
        assert self.address, self.stderr
        return self

    def wait(self, timeout_s: float = 20.0) -> int:
        """The exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join()
        return status

    @property
    def stderr(self) -> str:
        """What it wrote so far."""
        return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.lines.append(line)
                if line.startswith("listening at "):
                    self.address = line.removeprefix("listening at ").strip()
                    self._is_ready.set()
        self._is_ready.set()


@contextmanager
def dealer(address: str, *, receive_high_water_mark: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    """A bare client socket that says what no client of ours would."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 10_000
    socket.setsockopt(zmq.RCVHWM, receive_high_water_mark)
    socket.connect(address)
    try:
        yield socket
    finally:
        context.destroy(linger=0)
