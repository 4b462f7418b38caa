"""Writes the answers of a run as JSON Lines, one object a request, in the order in which they end.

Every line is flushed when its request ends, so that a crash costs the unfinished requests only. Undefined
figures are null; NaN is no JSON and never written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import msgspec

from conf.schema import RunConfig
from pipeline.errors import ConfigError, OutputError, shown_path
from pipeline.messages import RequestFinished, TextBlock
from pipeline.request_queue import Request


def check_output(path: Path, *, prompts_file: Path | None) -> None:
    """Raise `ConfigError` if answers cannot be written to `path`; touches nothing.

    prompts_file: the file that prompts are read from, which must not be overwritten.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"output={shown_path(path)} is a folder, expected a file; add a name")
        if not path.parent.is_dir():
            raise ConfigError(
                f"output={shown_path(path)}: there is no folder {shown_path(path.parent)}; create it"
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(
                f"output={shown_path(path)} cannot be written, expected a writable path; choose another"
            )
        if prompts_file is not None and path.exists() and path.samefile(prompts_file):
            raise ConfigError(
                f"output={shown_path(path)} is the prompts_file, expected another file; choose another"
            )
    except OSError as error:  # such as a name that is too long
        raise ConfigError(
            f"output={shown_path(path)} cannot be written: {error.strerror}; choose another"
        ) from None


def check_output_is_no_model(path: Path, *configs: RunConfig) -> None:
    """Raise `ConfigError` if `path` lies in a model that one of `configs` names: weights stay whole.

    configs: the run's, before and after its models were found.
    """
    output = path.resolve()
    for config in configs:
        draft = config.speculation.draft.path
        for key, named in (("model.path", config.model.path), ("speculation.draft.path", draft)):
            # What names no file or folder, such as a hub id, cannot be overwritten.
            if named is None or not (model := Path(named).expanduser()).exists():
                continue
            if output.is_relative_to(model.resolve()):
                raise ConfigError(
                    f"output={shown_path(path)} belongs to the model {key}={shown_path(model)}, expected a "
                    "file outside of it; choose another"
                )


class AnswerWriter:
    """The output file of a run. A context manager; an existing file is replaced."""

    def __init__(self, path: Path) -> None:
        """Open `path` for writing. Raises `ConfigError` if that fails."""
        self._path = path
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"output={shown_path(path)} cannot be written: {error.strerror}; choose another"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as error:
            if exc is None:  # else this is the same trouble once more
                raise self._error(error) from error

    def write_answer(self, request: Request, finished: RequestFinished, blocks: Sequence[TextBlock]) -> None:
        """Write one answered (or cancelled) request, of which these blocks came."""
        logprobs = [msgspec.to_builtins(entry) for block in blocks for entry in block.logprobs or []]
        self._write(
            {
                "request_id": request.request_id,
                "prompt": request.text,
                "prompt_token_ids": request.prompt_token_ids,
                "text": finished.text,
                "token_ids": [token_id for block in blocks for token_id in block.token_ids],
                "finish_reason": finished.finish_reason.value,
                "stop_reason": finished.stop_reason,
                "num_prompt_tokens": finished.num_prompt_tokens,
                "num_output_tokens": finished.num_output_tokens,
                "seed": request.sampling.seed,
                "logprobs": logprobs if request.sampling.logprobs is not None else None,
                "metrics": msgspec.to_builtins(finished.metrics),
            }
        )

    def write_failure(self, request: Request, reason: str) -> None:
        """Write one failed request: the fields of an answer, undefined ones null, and the reason."""
        self._write(
            {
                "request_id": request.request_id,
                "prompt": request.text,
                "prompt_token_ids": request.prompt_token_ids,
                "text": None,
                "token_ids": None,
                "finish_reason": "error",
                "stop_reason": None,
                "num_prompt_tokens": None,
                "num_output_tokens": 0,
                "seed": request.sampling.seed,
                "logprobs": None,
                "metrics": None,
                "error": reason,
            }
        )

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> OutputError:
        return OutputError(
            f"the answers cannot be written to output={shown_path(self._path)}: {error.strerror}"
        )
