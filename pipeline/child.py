"""One stage process as its supervisor sees it: started, watched, ended. Knows nothing of messages."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.control import Connected, Hello, ProfileStarted, Ready, StageFailed, StageProfile, StageStats
from pipeline.errors import EngineDead
from pipeline.shm_memory import PoolExport
from pipeline.topology import StageSpec

_EXIT_TERMINATED = 128 + signal.SIGTERM
"""Status of a stage that closed itself on SIGTERM, as `pipeline.process` does."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class StageChild:
    """A running (or ended) stage process, and what it told the supervisor.

    exports: the pools it owns, known once it is ready.
    said: its answers to the steps of the start, by type.
    failure: what it reported when it failed, if it could.
    stats: its latest figures.
    profile: its answer to the last word about a profile.
    """

    def __init__(self, spec: StageSpec, control_address: str, run_directory: Path, lifeline: int) -> None:
        """Start the process. Raises `EngineDead` when the system refuses.

        lifeline: a descriptor whose other end closes when the supervisor ends; the child's stdin.
        """
        self.spec = spec
        self.exports: list[PoolExport] = []
        self.is_running = False
        self.said: dict[type, Hello | Ready | Connected] = {}
        self.failure: StageFailed | None = None
        self.stats: StageStats | None = None
        self.profile: ProfileStarted | StageProfile | None = None
        command = [sys.executable, "-P", "-m", "pipeline.process", spec.name.value, control_address]
        command += ["--run-directory", str(run_directory), "--supervisor-pid", str(os.getpid())]
        if spec.cores is not None:
            command += ["--cores", *map(str, spec.cores)]
        if spec.io_cores is not None:
            command += ["--io-cores", *map(str, spec.io_cores)]
        if spec.busy_poll_us:
            command += ["--busy-poll-us", str(spec.busy_poll_us)]
        try:
            with _interrupts_blocked():
                # stdout belongs to the answers, so a stage's goes to stderr (2). A process group of its own:
                # what is sent to ours (by timeout, a closing terminal) is the supervisor's business. Not a
                # session of its own: Linux schedules sessions as groups, which doubled the mail's latency.
                self._process = subprocess.Popen(
                    command, stdin=lifeline, stdout=2, env=_environment(spec), process_group=0
                )
        except OSError as error:
            raise EngineDead(f"{spec.name.value} cannot be started: {error}") from error
        self.pid = self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone (and reaped)."""
        return self._process.poll() is not None

    def describe_end(self) -> str:
        """How the process ended, as a phrase: `was killed by SIGKILL`, `exited with status 1`."""
        status = self._process.poll()
        if status is None:
            return "still runs"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
            return f"was killed by signal {-status}"
        if status == _EXIT_TERMINATED:
            return "was ended by SIGTERM"
        return f"exited with status {status}"

    def was_killed(self) -> bool:
        """Whether a signal ended it: then it is the cause, and never the consequence of another's end."""
        status = self._process.poll()
        return status is not None and (status < 0 or status == _EXIT_TERMINATED)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process is gone; False when it takes longer."""
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM). Does nothing when it is gone."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process at once (SIGKILL). Does nothing when it is gone."""
        self._process.kill()


def _environment(spec: StageSpec) -> dict[str, str]:
    """The child's environment: our import path, in our order, and what its threads are to do."""
    paths = [os.path.abspath(path) for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.update(dict.fromkeys(_THREAD_VARIABLES, str(spec.threads)))
    if spec.has_patient_threads:
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Hold Ctrl-C back: the child inherits the mask, so it cannot be hit before it ignores SIGINT."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
