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
from tools.bench.protocol import (
    Answer,
    EngineSpec,
    Failed,
    FromWorker,
    NotHere,
    PeerSpec,
    Question,
    Ready,
    Skipped,
    ToWorker,
)

_MODULES = {
    "transformers": "tools.bench.transformers_peer",
    "transformers_lookup": "tools.bench.transformers_peer",
    "transformers_assisted": "tools.bench.transformers_peer",
    "llama_cpp": "tools.bench.llama_peer",
}
_ENGINE_MODULE = "tools.bench.engine_system"


class System(Protocol):
    """What answers. Every module above has `open_system(spec)`, a context manager that gives one."""

    @property
    def given(self) -> str:
        """What it runs with, in words."""

    def answer(self, question: Question) -> Answer:
        """Answer one question. Raises whatever goes wrong."""


def serve(lines: BinaryIO, out: BinaryIO) -> int:
    """Load what the first line says, answer the others until the input ends. Returns the exit status."""
    decoder = msgspec.json.Decoder(ToWorker)

    def send(message: FromWorker) -> None:
        out.write(msgspec.json.encode(message) + b"\n")
        out.flush()

    try:
        spec = decoder.decode(lines.readline())
        assert not isinstance(spec, Question), "the specification comes first"
        with _open(spec) as system:
            send(Ready(given=system.given))
            while line := lines.readline():
                question = decoder.decode(line)
                assert isinstance(question, Question), "after the specification there are only questions"
                send(system.answer(question))
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
    name = _MODULES[spec.name] if isinstance(spec, PeerSpec) else _ENGINE_MODULE
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
