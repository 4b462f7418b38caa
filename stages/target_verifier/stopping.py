"""Where a block of newly chosen tokens ends: stop tokens, stop strings, `max_tokens`, context limit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeline.messages import FinishReason, Sampling
from stages.target_verifier.stop_text import StopText


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How much of a block is kept, and why the request ends, if it does."""

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """As in `Committed`."""
    num_cut_characters: int = 0
    """As in `Committed`."""


class StopRules:
    """What ends one request."""

    def __init__(
        self, sampling: Sampling, *, eos_token_ids: Collection[int], stop_text: StopText | None = None
    ) -> None:
        """stop_text: where the request has stop strings."""
        self._eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._stop_text = stop_text

    def find_ending(self, block: Sequence[int], *, room: int) -> Ending:
        """Cut a block at the first token that ends the request, which is kept, or where the room ends.

        room: tokens the request may still get, at least 1. A stop token, or the end of a stop string, that is
        the last one that fits ends the request as `stop`, as everywhere in the field. Call it once a block.
        """
        ending = self._ending_by_token(block, room=room)
        if self._stop_text is None:
            return ending
        # A token that ends the request is no text, so it completes no stop string either.
        num_text = ending.num_kept - (ending.finish_reason is FinishReason.STOP)
        match = self._stop_text.push(block[:num_text])
        if match is None:
            return ending
        return Ending(
            num_kept=match.index + 1,
            finish_reason=FinishReason.STOP,
            stop_reason=match.stop,
            num_cut_characters=match.num_cut_characters,
        )

    def _ending_by_token(self, block: Sequence[int], *, room: int) -> Ending:
        for index, token in enumerate(block[:room]):
            if token in self._eos_token_ids:
                return Ending(num_kept=index + 1, finish_reason=FinishReason.STOP)
            if token in self._stop_token_ids:
                return Ending(num_kept=index + 1, finish_reason=FinishReason.STOP, stop_reason=token)
        if len(block) >= room:
            return Ending(num_kept=room, finish_reason=FinishReason.LENGTH)
        return Ending(num_kept=len(block))
