"""Emulated hardware: a runner whose forwards cost nearly nothing and last what a table says.

It has the interface of `ModelRunner`, so that verifier and draft run on it unchanged: the same batches,
masks, KV pages and moves. A KV slot holds the hash of the context up to its token (`emulated_law`), and a
row finds its context in the last slot that it sees. A wrong mask, slot or move therefore gives another
text, as it would with a real model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from conf.limits import MAX_WHOLE_NUMBER
from conf.schema import DType, RunConfig
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.emulated_law import EmulatedLaw
from stages.model.emulated_times import TimeTable, wait_until
from stages.model.pages import KVCache
from stages.model.shape import ModelShape

KV_DTYPE = torch.int64
"""Of what a KV slot holds: two numbers."""


class EmulatedRunner:
    """A target or a draft, with its KV cache."""

    def __init__(
        self, law: EmulatedLaw, table: TimeTable | None, *, is_draft: bool, kv: KVCache, shape: ModelShape
    ) -> None:
        """table: what a forward lasts; None: no longer than it is computed. kv: int64, of `shape`."""
        self.shape = shape
        self.kv = kv
        self.dtype = torch.float32
        """Of the logits."""
        self._law = law
        self._table = table
        self._is_draft = is_draft
        # Views of the storage [1, 2, 1, slots, 1]: plain numbers, read and written one at a time.
        plane = kv.storage.numpy()[0, :, 0, :, 0]
        self._hashes, self._is_easy = plane[0], plane[1]

    @classmethod
    def with_pages(cls, config: RunConfig, *, is_draft: bool, num_pages: int) -> EmulatedRunner:
        """A runner whose KV cache has so many pages."""
        emulated, page_size = config.model.emulated, config.placement.page_size
        shape = emulated_shape(emulated.vocab_size)
        kv = KVCache(shape=shape, num_slots=num_pages * page_size, page_size=page_size, dtype=KV_DTYPE)
        # A draft's time is that of a whole step: see `stages.draft_speculator.emulated_draft`.
        table = None
        if not is_draft:
            table = TimeTable(emulated.target_rows, emulated.target_ms, scale=emulated.time_scale)
        runner = cls(EmulatedLaw(emulated), table, is_draft=is_draft, kv=kv, shape=shape)
        if config.model.dtype is DType.float64:
            runner.dtype = torch.float64
        return runner

    def warm_up(self) -> None:
        """Compute one row, so that the first request does not pay for what is only done once."""
        self._law.logits(
            torch.zeros(1, dtype=torch.int64),
            torch.ones(1, dtype=torch.bool),
            has_error=True,
            dtype=self.dtype,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the contexts of all rows and return logits [R, vocab], after the time of the table."""
        start_ns = time.monotonic_ns()
        self.kv.finish_moves()
        batch.check(vocab_size=self.shape.vocab_size, max_position=self.shape.max_position)
        contexts = list(self._write_contexts(batch))
        wanted = range(len(contexts)) if batch.logit_rows is None else batch.logit_rows
        hashes = np.array([contexts[row][0] for row in wanted], dtype=np.uint64).view(np.int64)
        is_easy = np.array([contexts[row][1] for row in wanted], dtype=bool)
        logits = self._law.logits(
            torch.from_numpy(hashes), torch.from_numpy(is_easy), has_error=self._is_draft, dtype=self.dtype
        )
        if self._table is not None:
            wait_until(start_ns + self._table.ns(len(batch.token_ids)))
        return logits

    def _write_contexts(self, batch: ForwardBatch) -> Iterator[tuple[int, bool]]:
        """Put the context of each row into its slot, and yield it."""
        row = 0
        for sequence in batch.sequences:
            physical = sequence.kv.physical_list
            for slot, parent in zip(sequence.write_slots, _parent_slots(sequence), strict=True):
                context = None
                if parent >= 0:
                    place = physical[parent]
                    context = int(self._hashes[place]) & ((1 << 64) - 1), bool(self._is_easy[place])
                hashed, is_easy = context = self._law.extend(context, batch.token_ids[row])
                place = physical[slot]
                self._hashes[place] = hashed - (1 << 64) if hashed >> 63 else hashed
                self._is_easy[place] = is_easy
                yield context
                row += 1


def _parent_slots(sequence: SequenceRows) -> list[int]:
    """The last slot that each row sees besides its own; -1 for the first token of a text."""
    slots, start = sequence.write_slots, sequence.prefix_len
    if sequence.mask is None:
        return [slot - 1 for slot in slots]
    parents = []
    for slot, visible in zip(slots, sequence.mask.numpy(), strict=True):
        seen = np.flatnonzero(visible)
        assert len(seen) > 0, f"the row of slot {slot} sees nothing of the tail"
        assert seen[-1] == slot - start, f"the row of slot {slot} does not see itself last"
        parents.append(start + int(seen[-2]) if len(seen) > 1 else start - 1)
    return parents


def emulated_shape(vocab_size: int) -> ModelShape:
    """The sizes that the stages ask for. A KV slot holds two numbers; there is no end-of-sequence token."""
    return ModelShape(
        model_type="emulated",
        vocab_size=vocab_size,
        hidden_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        intermediate_size=1,
        rms_norm_eps=1e-6,
        max_position=MAX_WHOLE_NUMBER,
        tie_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope_inv_freq=(),
        rope_attention_scaling=1.0,
        sliding_window=None,
        eos_token_ids=(),
    )
