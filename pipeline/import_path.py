"""The environment for a process of our own that shall import what this one does.

Such processes are started with `python -P`, because the caller's folder may hold files that are named like
modules. So they would import what is installed, also where this process came from another checkout.
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def environment_of_ours() -> dict[str, str]:
    """This process's environment, with the folder of this source before all others to import from."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *([before] if before else [])])}
