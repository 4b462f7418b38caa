"""How long an emulated forward lasts, and waiting for its end without burning a core."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

_SPIN_NS = 150_000
"""A sleep may end so much late; the last bit of a wait is spun."""


class TimeTable:
    """Milliseconds by tokens in a forward."""

    def __init__(self, rows: Sequence[int], times_ms: Sequence[float], *, scale: float = 1.0) -> None:
        """rows: ascending. times_ms: equally many. Between them linear, before the first constant."""
        self._rows = list(rows)
        self._times_ms = [scale * time_ms for time_ms in times_ms]

    def ms(self, num_rows: int) -> float:
        """Of a forward over `num_rows` tokens; beyond the table on the line through its last two entries."""
        rows, times = self._rows, self._times_ms
        if num_rows > rows[-1] and len(rows) > 1:
            slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
            return times[-1] + slope * (num_rows - rows[-1])
        return float(np.interp(num_rows, rows, times))

    def ns(self, num_rows: int) -> int:
        """The same in nanoseconds."""
        return int(1e6 * self.ms(num_rows))


def wait_until(deadline_ns: int) -> None:
    """Return when `time.monotonic_ns()` reaches the deadline: sleep, then spin the last 0.15 ms.

    A deadline is absolute: one that is past costs nothing.
    """
    remaining_ns = deadline_ns - time.monotonic_ns()
    if remaining_ns > _SPIN_NS:
        time.sleep((remaining_ns - _SPIN_NS) / 1e9)
    while time.monotonic_ns() < deadline_ns:
        pass
