"""What a run was measured with: the machine, the versions, the source, the weights; and its fingerprint.

Two runs with the same fingerprint measure the same thing, so that one can go on where the other stopped.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from pipeline.topology import usable_cores

_PACKAGES = ("torch", "transformers", "llama-cpp-python", "gguf", "numpy", "pyzmq")
_SOURCE_FOLDERS = ("conf", "kernels", "pipeline", "stages")
"""What our speed depends on; the tools are not among it."""
_SOURCE_SUFFIXES = (".py", ".c", ".h", ".yaml")
_ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, and the system."""
    return {
        "processor": _processor(),
        "usable_cores": list(usable_cores()),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that compute; those that are not installed are left out."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_digest() -> str:
    """SHA-256 over the engine's own files."""
    digest = hashlib.sha256()
    for name in _SOURCE_FOLDERS:
        for path in sorted((_ROOT / name).rglob("*")):
            if path.suffix in _SOURCE_SUFFIXES and path.is_file():
                digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def model_identity(folder: Path) -> str:
    """A folder and its weights, told by name, size and time of change: reading gigabytes takes too long."""
    resolved = folder.resolve()
    parts = [str(resolved)]
    for path in sorted([resolved / "config.json", *resolved.glob("*.safetensors")]):
        if path.is_file():
            stat = path.stat()
            parts.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    return " | ".join(parts)


def short_path(path: str) -> str:
    """A path as a report may show it: from this project's root or the home folder, where it lies in one."""
    for root, name in ((_ROOT, ""), (Path.home(), "~/")):
        if Path(path).is_relative_to(root):
            return f"{name}{Path(path).relative_to(root)}"
    return path


def fingerprint(identity: object) -> str:
    """SHA-256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
