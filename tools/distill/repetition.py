"""Finds where a text starts to loop, so that a draft is not trained on the same words over and over."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 8
MOST_REPEATS = 3
"""Times an n-gram may stand in an answer."""


def loop_start(token_ids: Sequence[int]) -> int | None:
    """Where the answer should be cut: before some n-gram comes once too often. None for a sound answer."""
    counts: dict[tuple[int, ...], int] = {}
    for end in range(NGRAM, len(token_ids) + 1):
        gram = tuple(token_ids[end - NGRAM : end])
        counts[gram] = counts.get(gram, 0) + 1
        if counts[gram] > MOST_REPEATS:
            return end - NGRAM
    return None
