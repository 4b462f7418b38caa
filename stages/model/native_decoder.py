"""The decoder in one call of a C function, for bfloat16 rows on a CPU.

Computes what `stages.model.decoder` computes, rounding at the same places; the sums inside a norm and an
attention run in another order. A row's logits are the same to the last bit whatever rows are beside it,
in chains and in trees.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native.packing import CMatrix
from stages.model.batch import ForwardBatch
from stages.model.decoder import Decoder, DecoderLayer
from stages.model.pages import KVCache

MAX_SEQUENCE_ROWS = 256
"""Rows of one request up to which this is the faster forward, with AMX; a long prompt is quicker through
PyTorch's attention, which makes matrix products of it. With AVX2 the two are equal at 1024 rows, and a
tenth apart at 300 and 512."""
_LANES = 16


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "dim", "inner")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("embed", "final_norm", "cos", "sin")),
        ("head", CMatrix),
        ("num_slots", ctypes.c_int64),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, CMatrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
    ]


class _Sequence(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("first_row", "num_rows", "length", "tail_start", "bias_stride", "reserved")
        ),
        ("physical", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class NativeDecoder:
    """Owns the packed weights and the buffers of a forward; writes into the cache it was made for."""

    def __init__(self, library: ctypes.CDLL, decoder: Decoder, cache: KVCache) -> None:
        """decoder: made with the C kernels."""
        self._library = library
        self._decoder = decoder
        """Owns what the C structures point to."""
        shape = decoder.shape
        self._group_size = shape.group_size
        self._model = _Model(
            num_layers=shape.num_layers,
            hidden=shape.hidden_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            dim=shape.head_dim,
            inner=shape.intermediate_size,
            eps=shape.rms_norm_eps,
            scale=shape.head_dim**-0.5,
            embed=_address(decoder.embed),
            final_norm=_address(decoder.final_norm),
            head=decoder.head.c_matrix,
            cos=_address(decoder.cos),
            sin=_address(decoder.sin),
            num_slots=cache.storage.shape[3],
        )
        self._layers = (_Layer * shape.num_layers)(*map(_layer, decoder.layers, cache.layers))
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the rows and write their keys and values. Returns logits float32 [R, vocab]."""
        num_rows = len(batch.token_ids)
        size = self._library.ssd_scratch_size(ctypes.byref(self._model), num_rows)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.bfloat16)
        sequences = (_Sequence * len(batch.sequences))()
        slots: list[int] = []
        kept: list[Tensor] = []
        for place, sequence in zip(sequences, batch.sequences, strict=True):
            physical = sequence.kv.physical_list
            place.first_row, place.num_rows = len(slots), sequence.num_rows
            place.length = sequence.prefix_len + sequence.tail_len
            if sequence.mask is None:
                place.tail_start = place.length - sequence.num_rows
            else:
                bias = _spread(sequence.mask, self._group_size)
                kept.append(bias)
                place.tail_start = sequence.prefix_len
                place.bias_stride, place.bias = bias.shape[1], bias.data_ptr()
            place.physical = sequence.kv.physical.data_ptr()
            slots += [physical[slot] for slot in sequence.write_slots]
        logit_rows = range(num_rows) if batch.logit_rows is None else batch.logit_rows
        logits = torch.empty(len(logit_rows), self._decoder.head_size)
        self._library.ssd_forward(
            ctypes.byref(self._model),
            self._layers,
            sequences,
            len(sequences),
            (ctypes.c_int64 * num_rows)(*batch.token_ids),
            (ctypes.c_int64 * num_rows)(*batch.positions),
            (ctypes.c_int64 * num_rows)(*slots),
            num_rows,
            (ctypes.c_int64 * len(logit_rows))(*logit_rows),
            len(logit_rows),
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_void_p(self._scratch.data_ptr()),
            torch.get_num_threads(),
        )
        return logits


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == torch.bfloat16, f"the C kernels take bfloat16, got {tensor.dtype}"
    assert tensor.is_contiguous(), f"the C kernels take dense tensors, got strides {tensor.stride()}"
    return tensor.data_ptr()


def _layer(layer: DecoderLayer, cached: tuple[Tensor, Tensor]) -> _Layer:
    return _Layer(
        input_norm=_address(layer.input_norm),
        post_norm=_address(layer.post_norm),
        q_norm=_address(layer.q_norm),
        k_norm=_address(layer.k_norm),
        qkv=layer.qkv.c_matrix,
        o=layer.o.c_matrix,
        gate_up=layer.gate_up.c_matrix,
        down=layer.down.c_matrix,
        keys=_address(cached[0]),
        values=_address(cached[1]),
    )


def _spread(mask: Tensor, group_size: int) -> Tensor:
    """A mask as the C function takes it.

    bool [rows, slots], True = may attend -> float32 [slots, rows * group, padded to whole vectors]."""
    queries = mask.repeat_interleave(group_size, dim=0).t()
    padded = -(-queries.shape[1] // _LANES) * _LANES
    bias = torch.zeros(queries.shape[0], padded)
    bias[:, : queries.shape[1]].masked_fill_(~queries, float("-inf"))
    return bias
