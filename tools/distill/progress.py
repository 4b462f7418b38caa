"""Progress lines on stderr: one a period, with rate and time left. No bars: the lines end in log files."""

from __future__ import annotations

import sys
import time


def say(line: str) -> None:
    """One line."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


class Progress:
    """Counts towards a total and speaks up once a period."""

    def __init__(self, what: str, unit: str, *, period_s: float = 15.0) -> None:
        self._what, self._unit, self._period_s = what, unit, period_s
        self._start = self._last = time.monotonic()
        self._count = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def rate(self) -> float:
        """Units a second since the start."""
        return self._count / max(self.elapsed_s, 1e-9)

    def add(self, count: int, *, share_done: float, note: str = "") -> None:
        """`count` more; share_done (0 to 1) of the whole is done."""
        self._count += count
        now = time.monotonic()
        if now - self._last >= self._period_s:
            self._last = now
            self.report(share_done=share_done, note=note)

    def report(self, *, share_done: float, note: str = "") -> None:
        """Speak up now."""
        left = self.elapsed_s * (1 - share_done) / share_done if share_done > 0 else 0.0
        say(
            f"{self._what}: {self._count:,} {self._unit}, {self.rate:,.0f}/s, {share_done:.0%}, "
            f"{left / 60:.1f} min left{', ' + note if note else ''}"
        )
