"""Ctrl-C once asks for an orderly end, twice aborts; SIGTERM and SIGHUP count as Ctrl-C.

Outside `deferred` the first signal raises `KeyboardInterrupt` at once, as Python does: while models are being
loaded there is nothing to bring to an end.

Imports nothing that takes time, so that a program can call `exit_on_ctrl_c` before its other imports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_on_ctrl_c() -> None:
    """Outside of `Interrupts`, end the process at Ctrl-C without a word (Python would show a traceback)."""
    signal.signal(signal.SIGINT, _exit)


def _exit(number: int, _frame: FrameType | None) -> None:
    # Not SystemExit: native code that calls back into Python, as some imports do, cannot pass it on.
    os._exit(128 + number)


class Interrupts:
    """Handles the signals while entered; the handlers from before come back at the end."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came."""
        self._is_deferred = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started with nohup, to outlive the terminal
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal is only noted in `received`; the second raises."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    @property
    def exit_status(self) -> int:
        """What a shell expects of a process that a signal ended."""
        return 128 + (self.received or signal.SIGINT)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_first = self.received is None
        if is_first:
            self.received = signal.Signals(number)
        if not (is_first and self._is_deferred):
            raise KeyboardInterrupt
