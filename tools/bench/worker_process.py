"""The bench's end of a worker: starts it, asks it, gives up on it, and ends it.

Errors are one class: whatever goes wrong costs this system only, and the reason is what the user reads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec

from pipeline.errors import shown
from pipeline.import_path import environment_of_ours
from tools.bench.protocol import (
    Answer,
    Answers,
    Batch,
    Failed,
    FromWorker,
    Ready,
    Skipped,
    ToWorker,
    WorkerSpec,
)

# -P: the caller's folder may hold files that are named like modules.
WORKER_COMMAND = (sys.executable, "-P", "-m", "tools.bench.worker")
_LAST_LINES = 3
_MOST_OF_STDERR = 20_000
_END_S = 15.0
"""How long a worker may take to stop by itself: an engine takes 5 s at most."""
_TERMINATE_S = 6.0
_READ_BYTES = 1 << 16


class WorkerLost(Exception):
    """A worker failed, died, or took too long; the text says which, and what it said last."""


class WorkerProcess:
    """One worker."""

    def __init__(self, spec: WorkerSpec, *, command: Sequence[str] = WORKER_COMMAND) -> None:
        """Store what to start."""
        self._spec = spec
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._decoder = msgspec.json.Decoder(FromWorker)
        # Not a pipe: nobody would read it while the worker works.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()

    def start(self, timeout_s: float) -> Ready | Skipped:
        """Start and load. Raises `WorkerLost`."""
        # A group of its own: Ctrl-C is for the bench, which then ends its workers.
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment_of_ours(),
                process_group=0,
            )
        except OSError as error:
            raise WorkerLost(f"cannot be started: {error}") from None
        reply = self._exchange(self._spec, timeout_s)
        if not isinstance(reply, Ready | Skipped):
            raise WorkerLost(f"expected Ready or Skipped, got {type(reply).__name__}")
        return reply

    def ask(self, batch: Batch, timeout_s: float) -> list[Answer]:
        """The answers to a batch. Raises `WorkerLost`."""
        reply = self._exchange(batch, timeout_s)
        if not isinstance(reply, Answers):
            raise WorkerLost(f"expected Answers, got {type(reply).__name__}")
        if len(reply.answers) != len(batch.questions):
            raise WorkerLost(f"gave {len(reply.answers)} answers to {len(batch.questions)} questions")
        return reply.answers

    def close(self) -> None:
        """End the worker, politely at first. May be called twice."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            for step, patience_s in ((None, _END_S), (process.terminate, _TERMINATE_S), (process.kill, None)):
                if step is not None:
                    step()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
                    break
            process.stdout.close()
        self._stderr.close()

    def abandon(self) -> None:
        """End a worker that is of no use any more: one that hangs would not hear a polite word."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)
            self._process.kill()
        self.close()

    def _exchange(self, message: ToWorker, timeout_s: float) -> FromWorker:
        process = self._process
        assert process is not None, "start comes first"
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()
        except OSError:
            raise self._lost() from None
        line = self._read_line(timeout_s)
        try:
            reply = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WorkerLost(f"sent what is no message: {error}") from None
        if isinstance(reply, Failed):
            raise WorkerLost(shown(" ".join(reply.reason.split()), most=400))
        return reply

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([handle], [], [], remaining)[0]:
                raise WorkerLost(f"gave no answer within {timeout_s:g} s{self._last_words()}")
            part = os.read(handle, _READ_BYTES)
            if not part:
                raise self._lost()
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _lost(self) -> WorkerLost:
        """Why the process is gone."""
        assert self._process is not None
        try:
            status = self._process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            return WorkerLost(f"closed its output{self._last_words()}")
        how = f"ended with status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-status).name}"
        return WorkerLost(f"{how}{self._last_words()}")

    def _last_words(self) -> str:
        # Not seek(): the worker writes at the same place of the same file.
        handle = self._stderr.fileno()
        start = max(0, os.fstat(handle).st_size - _MOST_OF_STDERR)
        lines = os.pread(handle, _MOST_OF_STDERR, start).decode(errors="replace").split("\n")
        last = [line.strip() for line in lines if line.strip()][-_LAST_LINES:]
        return f"; its last words: {shown(' / '.join(last), most=400)}" if last else ""
