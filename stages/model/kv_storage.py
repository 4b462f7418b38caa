"""The memory of a KV cache, and how much of it a machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ConfigError

_LONG_PAGE = 1024
"""Slots; beyond it a request's last page can waste more than most requests fill."""


def machine_memory() -> int:
    """Bytes that this machine has, or that its container may use."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdigit() else memory


def allocate_storage(
    size: tuple[int, ...], *, page_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Zeros, or `ConfigError` if they cannot be had; a CPU cache that could never fit is refused at once."""
    num_bytes = math.prod(size) * dtype.itemsize
    # A request takes whole pages: long ones are mostly empty, and fewer requests would not help.
    is_page_long = page_size > _LONG_PAGE
    needs = (
        f"the KV cache needs {num_bytes / 2**30:.1f} GiB ({size[3]} slots of "
        f"{num_bytes // size[3] / 1024:.1f} KiB, in pages of {page_size} slots)"
    )
    advice = f"lower {'placement.page_size, ' if is_page_long else ''}max_requests or model.max_context"
    if device.type == "cpu":
        memory_bytes = machine_memory()
        if num_bytes > memory_bytes:
            raise ConfigError(f"{needs}, the machine has {memory_bytes / 2**30:.1f} GiB; {advice}")
    try:
        return _lazy_zeros(size, dtype, device)
    except (MemoryError, OSError) as error:  # a limit of this process, or no overcommitment
        raise ConfigError(f"{needs}, which this process cannot have: {error}; {advice}") from None


def _lazy_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory is committed when it is first written, on a CPU.

    Zeros and not garbage: a masked slot that was never written has weight 0, but 0 * NaN is NaN.
    `torch.zeros` would touch every page at start; numpy's come from calloc, which does not.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(size)
