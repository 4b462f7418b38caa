"""Where a block of newly chosen tokens ends: end-of-sequence, `max_tokens`, context limit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeline.messages import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How much of a block is kept, and why the request ends, if it does."""

    num_kept: int
    finish_reason: FinishReason | None


def find_ending(block: Sequence[int], *, room: int, eos_token_ids: Collection[int]) -> Ending:
    """Cut a block at its first end-of-sequence token, which is kept, or where the room ends.

    room: tokens the request may still get, at least 1. An end-of-sequence token that is the last one
    that fits ends the request as `stop`, as everywhere in the field.
    """
    for index, token in enumerate(block[:room]):
        if token in eos_token_ids:
            return Ending(num_kept=index + 1, finish_reason=FinishReason.STOP)
    if len(block) >= room:
        return Ending(num_kept=room, finish_reason=FinishReason.LENGTH)
    return Ending(num_kept=len(block), finish_reason=None)
