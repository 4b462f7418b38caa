"""Weights in the order in which the C kernels read them, in large pages of memory."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

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

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised bfloat16 memory, aligned to 64 bytes."""
        num_bytes = 2 * torch.Size(shape).numel()
        if self._used + num_bytes > len(self._chunk):
            size = -(-max(num_bytes, _CHUNK_BYTES) // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(memory, dtype=torch.uint8)
            self._used = 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // 64) * 64
        return part.view(torch.bfloat16).view(shape)


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels multiply with this weight [out, in]."""
    return (
        weight.dtype == torch.bfloat16 and weight.shape[0] % _OUTPUTS == 0 and weight.shape[1] % _INPUTS == 0
    )


def pack(weight: Tensor, arena: Arena) -> Tensor:
    """bfloat16 [out, in] -> [out / 16, in / 32, 16, 16, 2], the layout of `matmul.h`."""
    assert can_pack(weight), f"{weight.dtype} {tuple(weight.shape)} cannot be packed"
    outputs, inputs = weight.shape
    shape = (outputs // _OUTPUTS, inputs // _INPUTS, _INPUTS // 2, _OUTPUTS, 2)
    blocks = weight.view(outputs // _OUTPUTS, _OUTPUTS, inputs // _INPUTS, _INPUTS // 2, 2)
    packed = arena.take(shape)
    packed.copy_(blocks.permute(0, 2, 3, 1, 4))
    return packed


def multiply(
    library: ctypes.CDLL, rows: Tensor, packed: Tensor, bias: Tensor | None, *, threads: int
) -> Tensor:
    """bfloat16 rows [T, in] times a packed weight, plus bias [out]: bfloat16 [T, out]."""
    rows = rows.contiguous()
    outputs = packed.shape[0] * _OUTPUTS
    out = rows.new_empty(rows.shape[0], outputs)
    library.ssd_matmul(
        ctypes.c_void_p(rows.data_ptr()),
        rows.shape[0],
        rows.shape[1],
        ctypes.c_void_p(packed.data_ptr()),
        None if bias is None else ctypes.c_void_p(bias.data_ptr()),
        outputs,
        ctypes.c_void_p(out.data_ptr()),
        threads,
    )
    return out
