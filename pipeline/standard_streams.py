"""Makes up for standard streams that were closed before the program started (`2>&-`, some daemons).

Without this the next file or socket to be opened would become descriptor 0, 1 or 2, and what is meant for a
stream would land in it; and Python's `sys.stdout` and `sys.stderr` would be None.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def open_missing_streams() -> None:
    """Connect descriptors 0 to 2 to the null device where they are closed; before anything else is opened."""
    for descriptor in range(3):
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            continue
        null = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(null, True)
        # The lowest free descriptor is taken, and all below this one are open.
        assert null == descriptor, f"expected descriptor {descriptor}, got {null}"
    if sys.stdout is None:
        sys.stdout = _writer(1)
    if sys.stderr is None:
        sys.stderr = _writer(2)


def _writer(descriptor: int) -> TextIO:
    return open(descriptor, "w", encoding="utf-8", errors="replace", closefd=False)
