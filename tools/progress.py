"""Progress on stderr: a bar on a terminal; else, where it ends in a log file, a line a period."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_BAR = "{percentage:3.0f}%|{bar:24}| {desc}"


def say(line: str) -> None:
    """One line, above the bar if there is one."""
    tqdm.write(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """Counts towards a total, and shows the rate and the time that is left."""

    def __init__(self, what: str, unit: str, *, period_s: float = 15.0) -> None:
        """period_s: between lines, where there is no bar."""
        self._what, self._unit, self._period_s = what, unit, period_s
        self._start = self._last = time.monotonic()
        self._count = 0
        # disable=None: no bar where stderr is no terminal.
        self._bar = tqdm(total=1.0, desc=what, bar_format=_BAR, file=sys.stderr, disable=None, leave=False)

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
        if not self._bar.disable:
            self._bar.n = share_done
            self._bar.set_description_str(f"{self._what}: {self._status(share_done, note)}")
            return
        now = time.monotonic()
        if now - self._last >= self._period_s:
            self._last = now
            self.report(share_done=share_done, note=note)

    def report(self, *, share_done: float, note: str = "") -> None:
        """A line, now."""
        say(f"{self._what}: {share_done:.0%}, {self._status(share_done, note)}")

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def _status(self, share_done: float, note: str) -> str:
        left = self.elapsed_s * (1 - share_done) / share_done if share_done > 0 else 0.0
        return (
            f"{self._count:,} {self._unit}, {self.rate:,.0f}/s, {left / 60:.1f} min left"
            f"{', ' + note if note else ''}"
        )
