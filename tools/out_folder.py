"""Makes sure that results can be written, before anything is measured that would be lost otherwise."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pipeline.errors import ConfigError, shown_path


def make_out_folder(folder: Path, *, key: str = "out") -> None:
    """Make a folder, if there is none, and write to it once.

    key: of the command line, for the error. Raises `ConfigError` where that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not os.access: root may write anywhere by that, also where no file can be made.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}={shown_path(folder)} cannot be written: {error.strerror}; choose another"
        ) from None
