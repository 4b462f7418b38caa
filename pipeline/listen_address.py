"""The address that an engine serves at: read, checked, and held so that no two engines share one.

ZeroMQ deletes whatever lies at an ipc path before it binds, another engine's socket or a file of the user's.
So an ipc path is locked (`PATH.lock`) and looked at first.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from pipeline.errors import ConfigError, shown, shown_path
from pipeline.run_directory import ipc_address

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:\[\]/]+):(\d{1,5}|\*)")
_EXPECTED = "expected ipc:///PATH or tcp://127.0.0.1:PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """A checked address."""

    text: str
    """As ZeroMQ takes it."""
    path: Path | None
    """Of an ipc address, absolute."""


def parse_listen(given: str, *, allow_remote: bool) -> ListenAddress:
    """Read `ipc://PATH` or `tcp://HOST:PORT` (port `*` or 0: a free one).

    Raises `ConfigError` for anything else, and for a host that others can reach unless `allow_remote`: there
    is no authentication and no encryption.
    """
    if given.startswith("ipc://"):
        name = given.removeprefix("ipc://")
        if not name or name.startswith("@") or name.endswith("/"):
            raise ConfigError(f"listen={shown_path(given)}: {_EXPECTED}; give the path of a socket to make")
        path = Path(os.path.abspath(name))
        return ListenAddress(text=_checked_ipc(path, given), path=path)
    match = _TCP.fullmatch(given)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise ConfigError(f"listen={shown_path(given)}: {_EXPECTED}")
    if not (_is_loopback(match[1]) or allow_remote):
        raise ConfigError(
            f"listen={shown(given)}: {match[1]} can be reached from other machines, and whoever connects may "
            "use the engine: there is no authentication and no encryption; expected 127.0.0.1, or "
            "allow_remote=true beside it if that is meant"
        )
    # ZeroMQ binds to numbers and interfaces, not to names.
    return ListenAddress(text=given.replace("//localhost:", "//127.0.0.1:"), path=None)


class BoundAddress:
    """A ROUTER socket bound at an address, and what keeps others away from it. A context manager.

    text: where clients connect, with the port that was chosen.
    """

    def __init__(self, socket_: zmq.Socket[bytes], address: ListenAddress) -> None:
        """Bind. Raises `ConfigError` when the address is in use or cannot be had."""
        self._socket = socket_
        self._path = address.path
        self._lock: int | None = None
        self._owns_file = False
        try:
            if address.path is not None:
                self._lock = _lock_beside(address)
                _check_free(address.path)
                self._owns_file = True
            self._bind(address)
        except BaseException:
            self.close()
            raise
        endpoint = bytes(socket_.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        # How a socket for IPv6 names an address of IPv4.
        self.text = re.sub(r"\[::ffff:([\d.]+)\]", r"\1", endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and remove its file and its lock. May be called twice."""
        self._socket.close()
        if self._lock is not None and self._path is not None:
            if self._owns_file:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
            with contextlib.suppress(OSError):
                os.unlink(_lock_path(self._path))
            os.close(self._lock)
            self._lock = None

    def _bind(self, address: ListenAddress) -> None:
        # The socket file is for this user only, from its first moment.
        umask = os.umask(0o077)
        try:
            self._socket.bind(address.text)
        except zmq.ZMQError as error:
            reason = (
                "is in use by another program"
                if error.errno == zmq.EADDRINUSE
                else f"cannot be bound: {error}"
            )
            raise ConfigError(f"listen={shown(address.text)}: {reason}; choose another address") from None
        finally:
            os.umask(umask)


def _checked_ipc(path: Path, given: str) -> str:
    if not path.parent.is_dir():
        raise ConfigError(
            f"listen={shown_path(given)}: there is no folder {shown_path(path.parent)}; make it"
        )
    return ipc_address(path)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name or an interface


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock_beside(address: ListenAddress) -> int:
    """The descriptor of the lock of an ipc path, held until it is closed. Raises `ConfigError`."""
    assert address.path is not None
    lock_path = _lock_path(address.path)
    while True:
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"listen={shown_path(address.text)}: cannot make {shown_path(lock_path)}: {error.strerror}; "
                "choose another path"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(lock_path)):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"listen={shown_path(address.text)}: another engine serves there; choose another address"
            ) from None
        except FileNotFoundError:
            pass
        os.close(lock)  # its owner has just removed it: make a new one


def _check_free(path: Path) -> None:
    """Raise `ConfigError` unless nothing lies at `path`, or a socket that nobody serves any more."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"listen=ipc://{shown_path(path)}: a file lies there; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConfigError(
        f"listen=ipc://{shown_path(path)}: another program serves there; choose another address"
    )
