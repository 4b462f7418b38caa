"""The private directory of one engine: its sockets, and the names of its shared memory.

Called `ssd-<pid>-<random>`, mode 0700, in $XDG_RUNTIME_DIR or the temporary directory, so two engines
never meet. The owner holds a lock in it for life; a directory whose lock is free belongs to nobody and
is swept by the next engine that starts (a pid alone would not tell: it may be reused, or belong to
another container).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.shm_memory import SHARED_MEMORY

_NAME = re.compile(r"ssd-(\d+)-[0-9a-f]{8}")
_LOCK = "lock"
_LONGEST_IPC_PATH = 107


def runtime_root() -> Path:
    """Where run directories are made: $XDG_RUNTIME_DIR if it can be used, else the temporary directory."""
    root = os.environ.get("XDG_RUNTIME_DIR")
    if root and os.access(root, os.W_OK | os.X_OK):
        return Path(root)
    return Path(tempfile.gettempdir())


class RunDirectory:
    """Makes and locks a fresh directory; `remove` deletes it and all that carries its name."""

    def __init__(self, root: Path) -> None:
        """Raises `ConfigError` when `root` cannot be written."""
        sweep_stale(root)
        self.path = root.absolute() / f"ssd-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self.path.mkdir(mode=0o700)
            self._lock = _try_lock(self.path, os.O_CREAT)
        except OSError as error:
            raise ConfigError(
                f"cannot make a run directory in {root}: {error.strerror}; set XDG_RUNTIME_DIR or TMPDIR "
                "to a folder that can be written"
            ) from error

    def address(self, name: str) -> str:
        """The ZeroMQ address of the socket `name`. Raises `ConfigError` when the path is too long for one."""
        return ipc_address(self.path / name)

    def remove(self) -> None:
        """Delete the directory, its sockets and its shared memory. May be called twice."""
        remove_run(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def ipc_address(path: Path) -> str:
    """`ipc://path`. Raises `ConfigError` above the 107 bytes that the system allows a socket path."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > _LONGEST_IPC_PATH:
        raise ConfigError(
            f"socket path of {num_bytes} bytes, at most {_LONGEST_IPC_PATH} are possible: {path}; "
            "set XDG_RUNTIME_DIR or TMPDIR to a shorter folder"
        )
    return f"ipc://{path}"


def remove_run(path: Path) -> None:
    """Delete a run directory and the shared memory that carries its name, whoever made them.

    Never raises: all stages of a lost run do this at once, and each may find the work of another.
    """
    for directory in (SHARED_MEMORY, path):
        # Not Path.glob, which fails on a directory that vanishes under it.
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(f"{path.name}-"):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
    shutil.rmtree(path, ignore_errors=True)


def sweep_stale(root: Path) -> list[Path]:
    """Remove the run directories in `root` that no engine owns any more, and return them."""
    removed = []
    for path in root.glob("ssd-*"):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if match and path.stat().st_uid == os.getuid() and _is_abandoned(path, int(match[1])):
                remove_run(path)
                removed.append(path)
    return removed


def live_runs(root: Path) -> list[Path]:
    """The run directories in `root` whose engines run, and that belong to this user."""
    found = []
    for path in sorted(root.glob("ssd-*")):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if match and path.stat().st_uid == os.getuid() and not _is_abandoned(path, int(match[1])):
                found.append(path)
    return found


def _is_abandoned(path: Path, pid: int) -> bool:
    try:
        lock = _try_lock(path, 0)
    except FileNotFoundError:
        # Killed before it took the lock, or just about to take it.
        return not _is_alive(pid)
    if lock is None:
        return False
    os.close(lock)
    return True


def _try_lock(path: Path, flags: int) -> int | None:
    """The descriptor of the directory's lock, or None when somebody holds it."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
