"""Compiles the C kernels once and loads them: a shared library in the user's cache folder.

The file's name says what it was made from: sources, compiler, flags and the CPU's abilities. A changed
source or another machine makes another file, and two processes that build at once write the same one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = (
    "decoder.c",
    "matmul.h",
    "product_amx.h",
    "product_bf16.h",
    "product_fma.h",
    "scratch.h",
    "vector.h",
)
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
_NEEDED = frozenset(("avx2", "fma"))
_TIMEOUT_S = 120


class NativeUnavailableError(Exception):
    """The kernels cannot be had on this machine; the message says why."""


@functools.cache
def load_native(*, cache_folder: Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library, compiled if need be, with further `flags`. Raises `NativeUnavailableError`."""
    missing = sorted(_NEEDED - _cpu_flags())
    if missing:
        raise NativeUnavailableError(
            f"they need an x86 CPU with AVX2 and FMA, this one lacks {' and '.join(missing)}"
        )
    compiler = _find_compiler()
    path = cache_folder / f"kernels-{_fingerprint(compiler, flags)}.so"
    if not path.is_file():
        _compile(compiler, flags, path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from None
    if library.ssd_prepare() != 0:
        raise NativeUnavailableError("the kernel refused the use of the matrix unit (AMX)")
    library.ssd_scratch_size.restype = ctypes.c_int64
    for function in (library.ssd_forward, library.ssd_matmul):
        function.restype = None
    return library


def _cpu_flags() -> frozenset[str]:
    """What the processor can do, in Linux's words; empty where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(found, []))


def _find_compiler() -> str:
    names = [os.environ.get("CC", ""), "cc", "gcc"]
    for name in filter(None, names):
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeUnavailableError("there is no C compiler: install gcc, or set CC")


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [version, " ".join((*_FLAGS, *flags)).encode(), platform.machine().encode()]
    parts.append(" ".join(sorted(_cpu_flags())).encode())
    parts += [(_FOLDER / name).read_bytes() for name in _SOURCES]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="kernels-") as scratch:
            made = Path(scratch) / path.name
            command = [compiler, *_FLAGS, *flags, str(_FOLDER / _SOURCES[0]), "-o", str(made)]
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
            if result.returncode != 0:
                _log.warning("%s failed:\n%s", " ".join(command), result.stderr.strip())
                raise NativeUnavailableError(f"{compiler} could not compile them: see the warning")
            os.replace(made, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"they could not be compiled: {error}") from None
