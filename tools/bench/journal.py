"""OUT/answers.jsonl: what was measured so far, a line at a time, so that a killed run goes on where it was.

The first line says what is measured (`identity`) and its fingerprint; a run with another fingerprint is
refused, because figures of two machines, models or versions must not be mixed. A last line that a kill cut
short is dropped.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from pipeline.errors import ConfigError, shown, shown_path
from tools.bench.cases import Case, Phase
from tools.bench.identity import fingerprint
from tools.bench.protocol import Answer

FILE_NAME = "answers.jsonl"
PromptKey = tuple[str, int]
"""Set and place in it."""
RowKey = tuple[Case, str, int, str, int]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all lines; the tag is the class name."""


class Header(_Entry, frozen=True, kw_only=True):
    """The first line."""

    fingerprint: str
    identity: dict[str, Any]


class Started(_Entry, frozen=True, kw_only=True):
    """A worker is ready; the last one of a system counts."""

    label: str
    phase: Phase
    given: str
    source: str
    """Digest of the engine's source."""


class Row(_Entry, frozen=True, kw_only=True):
    """What one system answered to prompts that were asked at once."""

    case: Case
    set_name: str
    index: int
    """Of the first prompt in its set; the others follow it."""
    label: str
    """Of the system."""
    repeat: int
    """From 0."""
    answers: list[Answer]

    @property
    def key(self) -> RowKey:
        """What no two rows share."""
        return self.case, self.set_name, self.index, self.label, self.repeat

    def answers_by_prompt(self) -> Iterator[tuple[PromptKey, Answer]]:
        """Every answer, with set and index of its prompt."""
        for number, answer in enumerate(self.answers):
            yield (self.set_name, self.index + number), answer


class Journal:
    """The open file and what it holds. A context manager."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, may_differ: Sequence[str] = ()) -> None:
        """Open, or begin, the journal in `folder`, which is made if there is none.

        may_differ: keys of `identity` that do not matter.
        Raises `ConfigError` if it belongs to a run with another fingerprint, is no journal, is in use, or
        cannot be written.
        """
        self._path = folder / FILE_NAME
        self.rows: dict[RowKey, Row] = {}
        self.given: dict[tuple[str, Phase], str] = {}
        """What each system that was started ran with in each phase."""
        self.sources: set[str] = set()
        """Digests of the source that the answers come from."""
        self._may_differ = may_differ
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._path.open("a+b")
        except OSError as error:
            raise ConfigError(
                f"out={shown_path(folder)} cannot be written: {error.strerror}; choose another"
            ) from None
        try:
            self._lock()
            self._read(identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, entry: Row | Started) -> None:
        """Write down answers or a start."""
        self._note(entry)
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()

    def _note(self, entry: Row | Started) -> None:
        match entry:
            case Row():
                self.rows[entry.key] = entry
            case Started():
                self.given[entry.label, entry.phase] = entry.given
                self.sources.add(entry.source)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{shown_path(self._path)} is in use by another bench; choose another out=FOLDER"
            ) from None

    def _read(self, identity: Mapping[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole, _, cut_short = content.rpartition(b"\n")
        if cut_short:
            self._file.truncate(len(content) - len(cut_short))
        # As it will be read back: tuples are lists, for example.
        identity = json.loads(json.dumps(identity))
        if not whole:
            header = Header(fingerprint=fingerprint(identity), identity=dict(identity))
            self._file.write(msgspec.json.encode(header) + b"\n")
            self._file.flush()
            return
        decoder = msgspec.json.Decoder(Header | Started | Row)
        for number, line in enumerate(whole.split(b"\n"), start=1):
            try:
                entry = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._no_journal(number, str(error)) from None
            if isinstance(entry, Header) != (number == 1):
                raise self._no_journal(number, "a header belongs to the first line")
            if isinstance(entry, Header):
                self._check(entry, identity)
            else:
                self._note(entry)

    def _no_journal(self, number: int, reason: str) -> ConfigError:
        return ConfigError(
            f"{shown_path(self._path)}:{number} was not written by this bench ({shown(reason)}); choose "
            "another out=FOLDER"
        )

    def _check(self, header: Header, identity: Mapping[str, Any]) -> None:
        if header.fingerprint == fingerprint(identity):
            return
        keys = sorted({*header.identity, *identity} - {*self._may_differ})
        other = [key for key in keys if header.identity.get(key) != identity.get(key)]
        if not other:
            return
        advice = ", or go on all the same with mix_sources=true" if other == ["source"] else ""
        raise ConfigError(
            f"{shown_path(self._path)} holds answers of another run (other: {', '.join(other)}); choose "
            f"another out=FOLDER, or delete it{advice}"
        )
