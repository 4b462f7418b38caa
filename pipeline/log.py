"""Logging to stderr, each line with the name of its stage; stdout belongs to the answers.

The level comes from the environment variable `SSD_LOG` (debug, info, warning, error; default warning),
which stage processes inherit.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter

LEVEL_VARIABLE = "SSD_LOG"
_ROOT = "ssd"


def get_logger(module_name: str) -> logging.Logger:
    """The logger of one module, below the engine's own root: other libraries keep their settings."""
    return logging.getLogger(f"{_ROOT}.{module_name}")


def configure_logging(process_name: str, level: str | None = None, *, refuses_aloud: bool = True) -> None:
    """Send the engine's log to stderr, prefixed with `process_name`. May be called again.

    level: a level name; None takes `SSD_LOG`. An unknown name means warning.
    refuses_aloud: say so of an unknown name. One process of a run should, not all that share the variable.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE) or "warning").upper()
    number = logging.getLevelNamesMapping().get(name)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[{process_name}] %(levelname)s %(message)s"))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(number if number is not None else logging.WARNING)
    if number is None and refuses_aloud:
        root.warning("%s: expected debug, info, warning or error, got %r", LEVEL_VARIABLE, name.lower())


class WarnOnce:
    """Says a warning the first time and only counts it afterwards: one instance per owner, no globals.

    counts: how often each key came up.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._logger = logger

    def __call__(self, key: str, message: str, *args: object) -> None:
        """Warn with `message % args` if `key` is new."""
        self.counts[key] += 1
        if self.counts[key] == 1:
            self._logger.warning(message, *args)
