"""The KV cache of one model: one storage tensor for all layers, handed out in pages, owned by one stage.

A handle maps *logical slots* 0..num_slots-1 of one request to physical slots. Pages of a handle are
contiguous where the free list allows, and such a handle is read as a view; others are gathered.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.attention import READ_BLOCK
from kernels.kv_write import move_kv
from pipeline.errors import ConfigError, RequestError
from stages.model.shape import ModelShape

_LONG_PAGE = 1024
"""Slots; beyond it a request's last page can waste more than most requests fill."""


class KVHandle:
    """The pages of one request. Made by `KVCache.allocate`; of no use after `KVCache.free`."""

    __slots__ = ("first_slot", "num_slots", "pages", "physical", "physical_list")

    def __init__(self, *, pages: list[int], page_size: int) -> None:
        self.pages = pages
        self.num_slots = len(pages) * page_size
        """Logical slots: what was asked for, rounded up to whole pages."""
        self.physical_list = [page * page_size + offset for page in pages for offset in range(page_size)]
        behind = [self.physical_list[0]] * READ_BLOCK
        self.physical = torch.tensor(self.physical_list + behind, dtype=torch.int64)
        """Physical slot of each logical one; a block more is readable, and holds anything."""
        is_contiguous = all(page == pages[0] + index for index, page in enumerate(pages))
        self.first_slot: int | None = pages[0] * page_size if is_contiguous else None
        """Physical slot of logical slot 0 when all slots follow it in order, else None."""


class KVCache:
    """Keys and values of every layer, in `num_slots // page_size` pages."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        num_slots: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """num_slots: physical slots, rounded up to whole pages. The memory is committed on first use.

        Raises `ConfigError` if the memory cannot be had.
        """
        if num_slots < 1 or page_size < 1:
            raise ConfigError(
                f"a KV cache of {num_slots} slots in pages of {page_size}: expected at least 1 of each; "
                "change placement.page_size or model.max_context"
            )
        self.page_size = page_size
        self.num_pages = -(-num_slots // page_size)
        # A block more than the pages: attention reads whole blocks, masked behind the end of a sequence.
        num_physical = self.num_pages * page_size + READ_BLOCK
        size = (shape.num_layers, 2, shape.num_kv_heads, num_physical, shape.head_dim)
        self.storage = _allocate(size, page_size=page_size, dtype=dtype, device=torch.device(device))
        """[layers, 2, kv_heads, slots, head_dim]: a head's slots lie together, as attention reads them."""
        self.layers = [(layer[0], layer[1]) for layer in self.storage]
        """Keys and values of each layer, [kv_heads, slots, head_dim]: views, made once."""
        self._is_free = [True] * self.num_pages
        self._num_free = self.num_pages
        self._live: set[KVHandle] = set()

    @property
    def free_pages(self) -> int:
        """Pages that no handle holds."""
        return self._num_free

    def allocate(self, num_slots: int) -> KVHandle:
        """Take pages for `num_slots` slots, contiguous ones if there are any. Raises `RequestError`."""
        num_pages = -(-num_slots // self.page_size)
        if num_slots < 1 or num_pages > self._num_free:
            raise RequestError(
                f"{num_slots} KV slots were asked for ({num_pages} pages of {self.page_size}), "
                f"{self._num_free} of {self.num_pages} pages are free; "
                "shorten the request or lower max_requests"
            )
        pages = self._find_pages(num_pages)
        for page in pages:
            self._is_free[page] = False
        self._num_free -= num_pages
        handle = KVHandle(pages=pages, page_size=self.page_size)
        handle.physical = handle.physical.to(self.storage.device)
        self._live.add(handle)
        return handle

    def free(self, handle: KVHandle) -> None:
        """Give the pages back. A handle is freed once."""
        assert handle in self._live, "a KV handle was freed twice, or belongs to another cache"
        self._live.remove(handle)
        for page in handle.pages:
            self._is_free[page] = True
        self._num_free += len(handle.pages)

    def move(self, handle: KVHandle, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy logical slots `src` to `dst` in all layers, reading all before writing any.

        src, dst: equally long; `dst` without repeats. Pairs with src == dst cost nothing.
        """
        assert len(src) == len(dst), f"{len(src)} slots cannot move to {len(dst)}"
        assert handle in self._live, "a KV handle was used after it was freed"
        pairs = [(a, b) for a, b in zip(src, dst, strict=True) if a != b]
        if not pairs:
            return
        physical = handle.physical_list
        device = self.storage.device
        move_kv(
            self.storage,
            torch.tensor([physical[a] for a, _ in pairs], device=device),
            torch.tensor([physical[b] for _, b in pairs], device=device),
        )

    def read(self, layer: int, handle: KVHandle, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of logical slots 0..length-1, each [kv_heads, length, head_dim].

        length: may be up to a `READ_BLOCK` beyond the handle's end; what is read there means nothing.
        """
        keys, values = self.layers[layer]
        if handle.first_slot is not None:
            first = handle.first_slot
            return keys[:, first : first + length], values[:, first : first + length]
        index = handle.physical[:length]
        return keys.index_select(1, index), values.index_select(1, index)

    def locate(self, handle: KVHandle, slots: Sequence[int]) -> slice | Tensor:
        """Physical slots of logical ones: a slice when they follow one another, else int64 [T]."""
        physical = [handle.physical_list[slot] for slot in slots]
        first = physical[0]
        if all(slot == first + index for index, slot in enumerate(physical)):
            return slice(first, first + len(physical))
        return torch.tensor(physical, device=self.storage.device)

    def check_integrity(self) -> None:
        """Check that the cache is idle and whole: no handle is out and every page is free exactly once."""
        held = [page for handle in self._live for page in handle.pages]
        if held or self._num_free != self.num_pages or not all(self._is_free):
            raise AssertionError(
                f"KV cache not idle: {len(self._live)} handles hold {len(held)} pages, {self._num_free} of "
                f"{self.num_pages} counted free, {sum(self._is_free)} marked free"
            )

    def _find_pages(self, num_pages: int) -> list[int]:
        """The first run of free pages that is long enough, else the first free pages there are."""
        start = 0
        for page in range(self.num_pages):
            if not self._is_free[page]:
                start = page + 1
            elif page - start + 1 == num_pages:
                return list(range(start, page + 1))
        free = [page for page in range(self.num_pages) if self._is_free[page]]
        return free[:num_pages]


def _allocate(size: tuple[int, ...], *, page_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
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
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
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
