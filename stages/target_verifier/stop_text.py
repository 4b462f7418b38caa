"""Finds the token that completes a stop string: text rules belong to the verifier where they end a request.

It decodes the output token by token, whatever the blocks are, so that every system ends at the same token.
Only requests with stop strings pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.incremental_text import IncrementalText, TextDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """A stop string in the output."""

    index: int
    """The token of the block that completes it."""
    stop: str
    num_cut_characters: int
    """From where the string begins to the end of the text of all tokens up to `index`."""


class StopText:
    """The text of one request, as far back as a stop string may reach."""

    def __init__(self, decoder: TextDecoder, stop: Sequence[str], *, min_tokens: int) -> None:
        """stop: none empty. min_tokens: what is complete within so many tokens does not count."""
        self._text = IncrementalText(decoder)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_kept = max(len(text) for text in stop) - 1
        self._num_tokens = 0
        self._settled = ""
        """The last characters that no later token can change."""
        self._num_ignored = 0
        """Characters, from the start of `_settled`, in which no match may end: those of the first tokens."""

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Take a block of output tokens. After a match there must be no further block."""
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            self._settled += self._text.push([token_id])
            # The request may end here, so what is pending counts as it would be read then.
            text = self._settled + self._text.pending_text()
            if self._num_tokens <= self._min_tokens:
                self._num_ignored = len(text)
            elif (found := self._find(text)) is not None:
                start, stop = found
                return StopMatch(index=index, stop=stop, num_cut_characters=len(text) - start)
            self._forget()
        return None

    def _find(self, text: str) -> tuple[int, str] | None:
        """The match that begins first, the longest of several."""
        matches = [
            (start, -len(stop), stop)
            for stop in self._stop
            if (start := text.find(stop, max(self._num_ignored - len(stop) + 1, 0))) >= 0
        ]
        if not matches:
            return None
        start, _, stop = min(matches)
        return start, stop

    def _forget(self) -> None:
        num_dropped = max(len(self._settled) - self._num_kept, 0)
        self._settled = self._settled[num_dropped:]
        self._num_ignored = max(self._num_ignored - num_dropped, 0)
