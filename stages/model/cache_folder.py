"""Folders derived once from other files and kept in the user's cache directory.

A folder appears complete or not at all: it is built under a temporary name and renamed, under a file lock,
so that two processes that want the same folder build it once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pipeline.errors import ConfigError


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/saguaro-engine`, or the same under `~/.cache`. Not created."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "saguaro-engine"


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cached folder `name`; `build(folder)` fills an empty one if there is none yet.

    Raises what `build` raises, and then leaves nothing behind; `ConfigError` if the cache is not writable.
    """
    root = cache_root()
    target = root / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            if not target.is_dir():
                _build(root, target, build)
    except OSError as error:
        raise ConfigError(
            f"cannot write the model cache {root}: {error}; free some space or set XDG_CACHE_HOME"
        ) from error
    return target


def _build(root: Path, target: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=root))
    try:
        build(scratch)
        scratch.chmod(0o755)
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, which goes away with it; the kernel drops it if this process dies."""
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_still(file, path):
                continue  # the holder before us removed it: whoever comes now locks another file
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_still(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
