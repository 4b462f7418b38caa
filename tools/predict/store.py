"""OUT/results.json: the finished cells, written anew after each, so that a killed study goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import ConfigError, shown, shown_path
from tools.predict.cells import Cell, CellKey

FILE_NAME = "results.json"


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    identity: dict[str, Any]
    cells: list[Cell]


class CellStore:
    """The cells of one study."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Open, or begin, the study in `folder`, which is made if there is none.

        identity: all that any cell depends on beyond its key.
        Raises `ConfigError` if the folder holds another study, or cannot be written.
        """
        self._path = folder / FILE_NAME
        # As it will be read back: tuples are lists, for example.
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.cells: dict[CellKey, Cell] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = self._path.read_bytes() if self._path.exists() else None
        except OSError as error:
            raise ConfigError(
                f"out={shown_path(folder)} cannot be used: {error.strerror}; choose another"
            ) from None
        if content is not None:
            self._read(content)

    def add(self, cell: Cell) -> None:
        """Keep a finished cell."""
        self.cells[cell.key] = cell
        content = _Content(identity=self._identity, cells=list(self.cells.values()))
        scratch = self._path.with_suffix(".partial")
        scratch.write_bytes(msgspec.json.encode(content))
        os.replace(scratch, self._path)

    def _read(self, content: bytes) -> None:
        try:
            stored = msgspec.json.decode(content, type=_Content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{shown_path(self._path)} was not written by this tool ({shown(error)}); choose another "
                "out=FOLDER"
            ) from None
        keys = sorted({*stored.identity, *self._identity})
        other = [key for key in keys if stored.identity.get(key) != self._identity.get(key)]
        if other:
            raise ConfigError(
                f"{shown_path(self._path)} holds another study (other: {', '.join(other)}); choose another "
                "out=FOLDER, or delete it"
            )
        self.cells = {cell.key: cell for cell in stored.cells}
