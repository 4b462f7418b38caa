"""Runs forwards of one model: one verb, `forward`. Owns the model's KV cache and its decoder."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from conf.schema import CpuKernels, WeightFormat
from kernels.attention import plan_visibility
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.cpu_kernels import choose_kernels
from stages.model.decoder import Decoder, SequencePlan
from stages.model.native_decoder import MAX_SEQUENCE_ROWS, NativeDecoder
from stages.model.pages import KVCache
from stages.model.shape import ModelShape
from stages.model.weights import LoadedModel, ModelWeights


class Runner(Protocol):
    """What verifier and draft need of a model."""

    shape: ModelShape
    kv: KVCache

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch, write its KV, and return logits [R, vocab]."""

    def warm_up(self) -> None:
        """Do what is only done once."""


class ModelRunner:
    """A model with its KV cache. Keeps packed copies of the weights: drop the `LoadedModel` afterwards."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        weights: ModelWeights,
        num_slots: int,
        page_size: int,
        dtype: torch.dtype,
        cpu_kernels: CpuKernels = CpuKernels.auto,
        weight_format: WeightFormat = WeightFormat.dtype,
        is_format_binding: bool = False,
    ) -> None:
        """num_slots: KV slots of all requests together. dtype: that of the weights.

        weight_format, is_format_binding: see `choose_kernels`.
        Raises `ConfigError` where `cpu_kernels` or the memory cannot be had.
        """
        assert weights.embed.dtype == dtype, f"weights are {weights.embed.dtype}, expected {dtype}"
        device = weights.embed.device
        self.shape = shape
        self.kv = KVCache(shape=shape, num_slots=num_slots, page_size=page_size, dtype=dtype, device=device)
        self._dtype = dtype
        self._device = device
        # No request can be at a position beyond its slots.
        self._num_positions = min(shape.max_position, self.kv.num_pages * page_size)
        kernels = choose_kernels(
            cpu_kernels,
            shape,
            weights,
            weight_format=weight_format,
            is_format_binding=is_format_binding,
        )
        self._decoder = Decoder(
            shape=shape, weights=weights, dtype=dtype, num_positions=self._num_positions, kernels=kernels
        )
        self._native = None if kernels is None else NativeDecoder(kernels.library, self._decoder, self.kv)

    @classmethod
    def with_pages(
        cls,
        model: LoadedModel,
        *,
        num_pages: int,
        page_size: int,
        cpu_kernels: CpuKernels = CpuKernels.auto,
        weight_format: WeightFormat = WeightFormat.dtype,
        is_format_binding: bool = False,
    ) -> ModelRunner:
        """A runner whose KV cache has so many pages of `page_size` slots."""
        return cls(
            shape=model.shape,
            weights=model.weights,
            num_slots=num_pages * page_size,
            page_size=page_size,
            dtype=model.weights.embed.dtype,
            cpu_kernels=cpu_kernels,
            weight_format=weight_format,
            is_format_binding=is_format_binding,
        )

    def warm_up(self) -> None:
        """Forward one token, so that the first request does not pay for what is only done once.

        On a CPU the system hands out the KV cache's memory, zeroed and in large pages, when it is first
        touched: half a second for the demo model.
        """
        handle = self.kv.allocate(1)
        rows = SequenceRows(kv=handle, prefix_len=0, write_slots=[0], tail_len=1, mask=None)
        self.forward(ForwardBatch(token_ids=[0], positions=[0], sequences=[rows], logit_rows=None))
        self.kv.free(handle)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch and write its keys and values.

        Returns logits [R, vocab], float32 (float64 when the model runs in float64).
        """
        batch.check(vocab_size=self.shape.vocab_size, max_position=self._num_positions)
        self.kv.finish_moves()
        if self._native is None:
            return self._forward_torch(batch)
        is_long = [sequence.num_rows > MAX_SEQUENCE_ROWS for sequence in batch.sequences]
        if not any(is_long):
            return self._native.forward(batch)
        if all(is_long):
            return self._forward_torch(batch)
        # What a row comes to must not depend on what is beside it: each goes the way it would go alone.
        num_logits = len(batch.token_ids if batch.logit_rows is None else batch.logit_rows)
        logits = torch.empty(num_logits, self._decoder.head_size)
        for forward, is_chosen in (
            (self._native.forward, [not long for long in is_long]),
            (self._forward_torch, is_long),
        ):
            part, places = batch.part(is_chosen)
            logits[places] = forward(part)
        return logits

    def _forward_torch(self, batch: ForwardBatch) -> Tensor:
        logit_rows = batch.logit_rows
        logits = self._decoder.forward(
            torch.tensor(batch.token_ids, device=self._device),
            torch.tensor(batch.positions, device=self._device),
            self._plan(batch.sequences),
            self.kv,
            None if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64, device=self._device),
        )
        return logits if self._dtype == torch.float64 else logits.float()

    def _plan(self, sequences: list[SequenceRows]) -> list[SequencePlan]:
        plans, start = [], 0
        for sequence in sequences:
            end = start + sequence.num_rows
            visibility = plan_visibility(
                num_rows=sequence.num_rows,
                length=sequence.prefix_len + sequence.tail_len,
                mask=sequence.mask,
                group_size=self.shape.group_size,
                dtype=self._dtype,
            )
            plans.append(
                SequencePlan(
                    rows=slice(start, end),
                    kv=sequence.kv,
                    write_slots=self.kv.locate(sequence.kv, sequence.write_slots),
                    visibility=visibility,
                )
            )
            start = end
        return plans
