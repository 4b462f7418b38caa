"""Tensor pools in memory that other processes of this host map: files in /dev/shm, or in the run directory.

The exporting stage creates a block, the other stages map it read-only, and as soon as all of them have,
the supervisor unlinks the file: from then on the memory lives as long as somebody maps it, and nothing is
left in /dev/shm however the processes end. Names begin with the name of the run directory, so that
whatever a crash during start leaves behind is found by prefix (`pipeline.run_directory`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import msgspec

from pipeline.errors import ConfigError, ProtocolError
from pipeline.tensor_pool import PoolSpec, TensorPool, pool_bytes

SHARED_MEMORY = Path("/dev/shm")


class PoolExport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a reader finds a pool."""

    spec: PoolSpec
    path: str


class SharedMemoryExporter:
    """Creates the pools that one stage owns.

    exports: what to tell the readers, in the order of creation.
    """

    def __init__(self, run_directory: Path, stage_name: str) -> None:
        self.exports: list[PoolExport] = []
        self._run_directory = run_directory
        self._stage_name = stage_name
        self._pools: list[tuple[TensorPool, mmap.mmap]] = []

    def export(self, spec: PoolSpec) -> TensorPool:
        """Allocate a zeroed pool and return its writing side. Raises `ConfigError` when memory is short."""
        num_bytes = pool_bytes(spec)
        name = f"{self._run_directory.name}-{self._stage_name}-{len(self.exports)}"
        path, descriptor = _create_block([SHARED_MEMORY, self._run_directory], name, num_bytes)
        try:
            memory = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        pool = TensorPool(spec, memoryview(memory), is_writable=True)
        self.exports.append(PoolExport(spec=spec, path=str(path)))
        self._pools.append((pool, memory))
        return pool

    def close(self) -> None:
        """Unmap the pools and unlink what is still linked. May be called twice."""
        for export in self.exports:
            Path(export.path).unlink(missing_ok=True)
        _unmap(self._pools)


class SharedMemoryReader:
    """Maps the pools that other stages export, read-only."""

    def __init__(self) -> None:
        self._pools: list[tuple[TensorPool, mmap.mmap]] = []

    def attach(self, export: PoolExport) -> TensorPool:
        """Map one pool. Raises `ProtocolError` when its file is missing or too short."""
        num_bytes = pool_bytes(export.spec)
        try:
            descriptor = os.open(export.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ProtocolError(f"pool {export.spec.name!r}: cannot open {export.path}: {error}") from error
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                raise ProtocolError(f"pool {export.spec.name!r}: {export.path} has under {num_bytes} bytes")
            memory = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        pool = TensorPool(export.spec, memoryview(memory), is_writable=False)
        self._pools.append((pool, memory))
        return pool

    def close(self) -> None:
        """Unmap the pools. May be called twice."""
        _unmap(self._pools)


def _create_block(directories: list[Path], name: str, num_bytes: int) -> tuple[Path, int]:
    """Create a file of `num_bytes` in the first directory with room for it; its path and descriptor.

    The bytes are allocated at once: a sparse file in a full /dev/shm would be a SIGBUS much later.
    """
    reasons = []
    for directory in directories:
        path = directory / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror}")
            continue
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, num_bytes)
            else:
                os.ftruncate(descriptor, num_bytes)
            return path, descriptor
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            reasons.append(f"{directory}: {error.strerror}")
    raise ConfigError(
        f"no room for {num_bytes} bytes of shared memory ({'; '.join(reasons)}); make one of them larger, "
        "or lower max_requests"
    )


def _unmap(pools: list[tuple[TensorPool, mmap.mmap]]) -> None:
    while pools:
        pool, memory = pools.pop()
        pool.release()
        # Somebody still holds a view of it; the end of the process unmaps it.
        with contextlib.suppress(BufferError):
            memory.close()
