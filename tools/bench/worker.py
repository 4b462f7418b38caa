"""One system in a process of its own: `python -m tools.bench.worker`, JSON lines on stdin and stdout.

It sleeps in `readline` while the others work. Whatever else is printed, by a library or by a stage process,
goes to stderr, which the bench keeps for its error message. Knows the kinds of system by name only: each is
imported when it is asked for, so that a worker loads one library and not all.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

import msgspec

from pipeline.errors import EngineError
from tools.bench.entries import PEERS
from tools.bench.protocol import (
    Answer,
    Answers,
    Batch,
    EngineSpec,
    Failed,
    FromWorker,
    NotHere,
    PeerSpec,
    Ready,
    Skipped,
    ToWorker,
)

_ENGINE_MODULE = "tools.bench.engine_system"


class System(Protocol):
    """What answers. Every module that is named has `open_system(spec)`, a context manager that gives one."""

    @property
    def given(self) -> str:
        """What it runs with, in words."""

    def answer(self, batch: Batch) -> list[Answer]:
        """Answer the questions, in their order. Raises whatever goes wrong."""


def serve(lines: BinaryIO, out: BinaryIO) -> int:
    """Load what the first line says, answer the others until the input ends. Returns the exit status."""
    decoder = msgspec.json.Decoder(ToWorker)

    def send(message: FromWorker) -> None:
        out.write(msgspec.json.encode(message) + b"\n")
        out.flush()

    try:
        spec = decoder.decode(lines.readline())
        assert not isinstance(spec, Batch), "the specification comes first"
        with _open(spec) as system:
            send(Ready(given=system.given))
            while line := lines.readline():
                batch = decoder.decode(line)
                assert isinstance(batch, Batch), "after the specification there are only questions"
                send(Answers(answers=system.answer(batch)))
    except NotHere as reason:
        send(Skipped(reason=str(reason)))
    except BrokenPipeError:
        return 1  # the bench is gone, and nobody listens
    except Exception as error:
        if not isinstance(error, EngineError):
            traceback.print_exc()
        send(Failed(reason=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _open(spec: EngineSpec | PeerSpec) -> AbstractContextManager[System]:
    if isinstance(spec, PeerSpec):
        # Before the libraries are imported: they count the cores then.
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, spec.cores)
        os.environ["OMP_NUM_THREADS"] = str(len(spec.cores))
    name = PEERS[spec.name].module if isinstance(spec, PeerSpec) else _ENGINE_MODULE
    opened: AbstractContextManager[System] = importlib.import_module(name).open_system(spec)
    return opened


def main() -> int:
    """Serve on stdin and on what was stdout."""
    own_stdout = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(own_stdout, "wb") as out:
        return serve(sys.stdin.buffer, out)


if __name__ == "__main__":
    sys.exit(main())
