"""What the next forward computes: a round of the running requests, and beside it a chunk of waiting prompts.

A long prompt is read in chunks, so that between two rounds of a running request the target never computes
more than one. A chunk shares the forward of a round: where a forward's time is that of reading the weights,
it is nearly free. A request has the same chunks whatever else runs, so that its KV does not depend
on its batch mates, not even in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stages.target_verifier.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of a prompt that are read in one forward."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_first(self) -> bool:
        """Whether nothing was read before it, but what the cache had."""
        return self.start == self.sequence.kv.num_cached

    @property
    def is_last(self) -> bool:
        """Whether the first output token can be chosen after it."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward of the target."""

    rounds: list[Sequence]
    """Requests whose proposals are verified."""
    chunks: list[Chunk]
    """Of different requests, together no more tokens than a chunk has."""

    @property
    def num_rows(self) -> int:
        """Tokens in the forward."""
        nodes = sum(len(sequence.tree()[0]) for sequence in self.rounds)
        return len(self.rounds) + nodes + sum(chunk.end - chunk.start for chunk in self.chunks)

    def of_those(self, sequences: Iterable[Sequence]) -> Step:
        """What of it concerns these."""
        draft_ids = {sequence.draft_id for sequence in sequences}
        return Step(
            rounds=[sequence for sequence in self.rounds if sequence.draft_id in draft_ids],
            chunks=[chunk for chunk in self.chunks if chunk.sequence.draft_id in draft_ids],
        )


def next_step(sequences: Iterable[Sequence], *, has_draft: bool, chunk_size: int) -> Step | None:
    """What to compute now; None while a running request waits for its proposal, or nothing runs.

    sequences: all admitted ones, in the order of admission. chunk_size: tokens.
    """
    running: list[Sequence] = []
    chunks: list[Chunk] = []
    left = chunk_size
    for sequence in sequences:
        if not sequence.is_prefilling:
            if has_draft and sequence.waits_for_proposal:
                return None
            running.append(sequence)
            continue
        start = sequence.num_prefilled
        end = min(start + chunk_size, len(sequence.token_ids))
        # A chunk is never cut to what is left: see the module docstring.
        if end - start <= left:
            chunks.append(Chunk(sequence=sequence, start=start, end=end))
            left -= end - start
    return Step(rounds=running, chunks=chunks) if running or chunks else None
