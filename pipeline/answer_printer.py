"""Shows answers on stdout while they come, without mixing two of them.

One request at a time is shown live, block by block; requests that share rounds are shown whole, each when it
ends. A run of a single prompt prints the answer and nothing else.
"""

from __future__ import annotations

from typing import TextIO

from pipeline.errors import OutputError
from pipeline.messages import RequestFinished, TextBlock
from pipeline.request_queue import Request

_HEADER_WIDTH = 100


class AnswerPrinter:
    """The answers' side of stdout."""

    def __init__(self, stream: TextIO, *, is_live: bool, has_headers: bool) -> None:
        """is_live: show text as it comes; only for one request at a time.

        has_headers: put a line with id and prompt before each answer.
        """
        self._stream = stream
        self._is_live = is_live
        self._has_headers = has_headers

    def begin(self, request: Request) -> None:
        """The request was submitted."""
        if self._is_live:
            self._header(request)

    def block(self, block: TextBlock) -> None:
        """Text of a request was committed."""
        if self._is_live and block.text:
            self._write(block.text)

    def end(self, request: Request, finished: RequestFinished) -> None:
        """The request is complete."""
        if not self._is_live:
            self._header(request)
            self._write(finished.text)
        self._write("\n\n" if self._has_headers else "\n")

    def fail(self, request: Request) -> None:
        """The request failed; why is said on stderr."""
        if self._is_live and self._has_headers:
            self._write("\n")

    def _header(self, request: Request) -> None:
        if self._has_headers:
            first_line = " ".join(request.title.split())
            if len(first_line) > _HEADER_WIDTH:
                first_line = first_line[: _HEADER_WIDTH - 1] + "…"
            self._write(f"--- {request.request_id}: {first_line}\n")

    def _write(self, text: str) -> None:
        write_text(self._stream, text)


def write_text(stream: TextIO, text: str) -> None:
    """Write to stdout, at once. Raises `OutputError`; a reader that left is `BrokenPipeError` as ever."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the answers cannot be written to stdout: {error.strerror}") from error
