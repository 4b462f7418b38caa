"""The error that a configuration raises, the base it shares with every other error, and how errors quote.

Here and not in `pipeline.errors`, because `conf` stands below `pipeline`; everyone else imports the
names from there.
"""

from __future__ import annotations

from pathlib import Path

_MOST_OF_A_TEXT = 60
_MOST_OF_A_PATH = 300
"""The end of a path tells more than the end of a value; 300 is longer than any single name can be."""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """The configuration cannot work. Raised before anything runs; the user changes a key."""


def shown(text: object, *, most: int = _MOST_OF_A_TEXT) -> str:
    """What a user gave, as an error may quote it: in one line, shortened, every control character visible.

    A terminal obeys control characters, so that a quoted one could hide the very error that quotes it.
    """
    given = str(text)
    cut = given if len(given) <= most else f"{given[:most]}... ({len(given)} characters)"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)


def shown_path(path: Path | str) -> str:
    """`shown`, for a path."""
    return shown(path, most=_MOST_OF_A_PATH)
