"""Weights in the order in which the C kernels read them, in large pages of memory."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from kernels.quantise import quantise_rows

_OUTPUTS, _INPUTS = 16, 32
_CHUNK_BYTES = 64 << 20
_LARGE_PAGE_BYTES = 2 << 20


class Arena:
    """Memory for weights, taken from the system in large pieces.

    Reading weights is what the time of a small batch goes into, and with pages of 4 KiB a tenth of it goes
    into finding the pages. What is taken is never given back.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory, aligned to 64 bytes."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        if self._used + num_bytes > len(self._chunk):
            size = -(-max(num_bytes, _CHUNK_BYTES) // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(memory, dtype=torch.uint8)
            self._used = 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // 64) * 64
        return part.view(dtype).view(shape)


class CMatrix(ctypes.Structure):
    """`Matrix` of `matmul.h`."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
    ]


class PackedMatrix:
    """A weight [out, in] in the layout of `matmul.h`, with its bias; bfloat16, or int8 with a scale a row."""

    __slots__ = ("_bias", "_packed", "_scales", "c_matrix")

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: Arena, *, is_int8: bool = False) -> None:
        """weight, bias: bfloat16; `can_pack` says which weights will do."""
        assert can_pack(weight), f"{weight.dtype} {tuple(weight.shape)} cannot be packed"
        outputs, inputs = weight.shape
        self._scales: Tensor | None = None
        if is_int8:
            weight, self._scales = quantise_rows(weight)
        shape = (outputs // _OUTPUTS, inputs // _INPUTS, _INPUTS // 2, _OUTPUTS, 2)
        blocks = weight.view(outputs // _OUTPUTS, _OUTPUTS, inputs // _INPUTS, _INPUTS // 2, 2)
        self._packed = arena.take(shape, weight.dtype)
        self._packed.copy_(blocks.permute(0, 2, 3, 1, 4))
        self._bias = None if bias is None else bias.contiguous()
        self.c_matrix = CMatrix(
            packed=self._packed.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            outputs=outputs,
            inputs=inputs,
        )

    def multiply(self, library: ctypes.CDLL, rows: Tensor, *, threads: int) -> Tensor:
        """bfloat16 rows [T, in] -> bfloat16 [T, out]."""
        rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], self.c_matrix.outputs)
        library.ssd_matmul(
            ctypes.byref(self.c_matrix),
            ctypes.c_void_p(rows.data_ptr()),
            rows.shape[0],
            ctypes.c_void_p(out.data_ptr()),
            threads,
        )
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels multiply with this weight [out, in]."""
    return (
        weight.dtype == torch.bfloat16 and weight.shape[0] % _OUTPUTS == 0 and weight.shape[1] % _INPUTS == 0
    )
