"""What one forward is asked to compute: packed tokens, their positions, and each request's share of them.

Prefill, decode, verification of a tree, and drafting of branches are all a `ForwardBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.model.pages import KVHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """One request's share of a forward. Its rows are consecutive in the packed batch."""

    kv: KVHandle
    prefix_len: int
    """P: logical slots 0..P-1 are seen by every row (the committed prefix)."""
    write_slots: list[int]
    """Logical slot that each new row's key and value are written to; all in [P, P + tail_len), distinct."""
    tail_len: int
    """S: slots P..P+S-1 are this request's uncommitted tree and pending tokens."""
    mask: Tensor | None
    """bool [rows, S], True = may attend; a row sees itself. None: the rows are a causal chain in the last
    `rows` slots of the tail, and everything before them is visible."""

    @property
    def num_rows(self) -> int:
        """New rows of this request."""
        return len(self.write_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward. Length T of the packed lists is the sum of the sequences' rows."""

    token_ids: list[int]
    positions: list[int]
    """Given, never derived: siblings in a tree share a position."""
    sequences: list[SequenceRows]
    logit_rows: list[int] | None
    """Packed rows whose logits are wanted, in this order; None: all."""

    def check(self, *, vocab_size: int, max_position: int) -> None:
        """Refuse a batch that would read or write outside what it names. Raises `AssertionError`."""
        num_rows = len(self.token_ids)
        assert num_rows > 0, "a forward needs at least one row"
        assert len(self.positions) == num_rows, f"{len(self.positions)} positions for {num_rows} tokens"
        assert sum(s.num_rows for s in self.sequences) == num_rows, "sequences do not cover the packed rows"
        _check_range("token ids", self.token_ids, 0, vocab_size)
        _check_range("positions", self.positions, 0, max_position)
        for sequence in self.sequences:
            _check_sequence(sequence)

    def part(self, is_chosen: Sequence[bool]) -> tuple[ForwardBatch, list[int]]:
        """The chosen sequences as a batch of their own, and where its logits stand among this batch's."""
        kept: list[int] = []
        start = 0
        for sequence, chosen in zip(self.sequences, is_chosen, strict=True):
            if chosen:
                kept += range(start, start + sequence.num_rows)
            start += sequence.num_rows
        new_row = {row: index for index, row in enumerate(kept)}
        wanted = range(start) if self.logit_rows is None else self.logit_rows
        places = [place for place, row in enumerate(wanted) if row in new_row]
        batch = ForwardBatch(
            token_ids=[self.token_ids[row] for row in kept],
            positions=[self.positions[row] for row in kept],
            sequences=[s for s, chosen in zip(self.sequences, is_chosen, strict=True) if chosen],
            logit_rows=[new_row[wanted[place]] for place in places],
        )
        return batch, places


def _check_range(what: str, values: list[int], start: int, end: int) -> None:
    low, high = min(values), max(values)
    assert start <= low <= high < end, f"{what} {low}..{high} are outside {start}..{end - 1}"


def _check_sequence(sequence: SequenceRows) -> None:
    slots, start, end = sequence.write_slots, sequence.prefix_len, sequence.prefix_len + sequence.tail_len
    assert slots, "a sequence needs at least one row"
    assert end <= sequence.kv.num_slots, f"slots up to {end} are used, the handle has {sequence.kv.num_slots}"
    _check_range("write slots", slots, start, end)
    frozen = sequence.kv.num_frozen
    assert min(slots) >= frozen, f"slot {min(slots)} is written, the first {frozen} may be shared"
    assert len(set(slots)) == len(slots), f"write slots {slots} repeat"
    if sequence.mask is None:
        first = end - len(slots)
        assert slots == list(range(first, end)), (
            f"without a mask the rows must fill the last slots {first}..{end - 1} in order, got {slots}"
        )
    else:
        expected = (len(slots), sequence.tail_len)
        assert tuple(sequence.mask.shape) == expected, f"mask is {tuple(sequence.mask.shape)}, not {expected}"
