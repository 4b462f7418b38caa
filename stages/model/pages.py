"""The KV cache of one model: one storage tensor for all layers, handed out in pages, owned by one stage.

A handle maps *logical slots* 0..num_slots-1 of one request to physical slots, and grows by pages. Its pages
follow one another where that can be had, and such a handle is read as a view; others are gathered. Full pages
of committed tokens are shared with later requests that begin with the same tokens (`keeps_prefixes`): nobody
writes to them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import READ_BLOCK
from kernels.kv_write import move_kv
from pipeline.errors import ConfigError, RequestError
from stages.model.kv_storage import allocate_storage
from stages.model.page_pool import PagePool
from stages.model.prefix_cache import PrefixIndex
from stages.model.shape import ModelShape

_NO_CLAIM = range(0)


class KVHandle:
    """The pages of one request. Made by `KVCache.allocate`; of no use after `KVCache.free`."""

    __slots__ = (
        "_page_size",
        "claim",
        "digests",
        "first_slot",
        "num_cached",
        "num_slots",
        "pages",
        "physical",
        "physical_list",
    )

    def __init__(
        self, *, pages: list[int], page_size: int, max_slots: int, digests: list[bytes], device: torch.device
    ) -> None:
        """max_slots: what it may grow to without a new table. digests: of its first pages, if shared."""
        self._page_size = page_size
        self.pages: list[int] = []
        self.num_slots = 0
        """Logical slots: what was asked for, rounded up to whole pages."""
        self.digests = digests
        """Of its first pages, those that are full of committed tokens; see `PrefixIndex`."""
        self.num_cached = len(digests) * page_size
        """Slots whose keys and values were there when it was made."""
        self.claim = _NO_CLAIM
        """Pages behind its last one that it may grow into; see `PagePool.claim`."""
        self.physical_list: list[int] = []
        self.first_slot: int | None = pages[0] * page_size
        """Physical slot of logical slot 0 when all slots follow it in order, else None."""
        self.physical = self._table(max_slots, device)
        """Physical slot of each logical one; at least a block more is readable, and holds anything."""
        self.extend(pages)

    @property
    def num_frozen(self) -> int:
        """Slots, from the first one, that are not written again: other requests may share them."""
        return len(self.digests) * self._page_size

    def extend(self, pages: list[int]) -> None:
        """These pages come behind the ones that it has."""
        size = self._page_size
        slots = [page * size + offset for page in pages for offset in range(size)]
        start, self.num_slots = self.num_slots, self.num_slots + len(slots)
        self.pages += pages
        self.physical_list += slots
        if len(self.physical) < self.num_slots + READ_BLOCK:
            longer = self._table(2 * self.num_slots, self.physical.device)
            longer[:start] = self.physical[:start]
            self.physical = longer
        if self.physical.device.type == "cpu":  # in a tenth of the time: requests grow while others wait
            self.physical.numpy()[start : self.num_slots] = slots
        else:
            self.physical[start : self.num_slots] = torch.tensor(slots, dtype=torch.int64)
        first = self.pages[0]
        if any(
            page != first + index for index, page in enumerate(self.pages[start // size :], start // size)
        ):
            self.first_slot = None

    def _table(self, num_slots: int, device: torch.device) -> Tensor:
        # What is read behind the end is masked: any slot will do.
        return torch.full((num_slots + READ_BLOCK,), self.first_slot or 0, dtype=torch.int64, device=device)


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
        self.storage = allocate_storage(size, page_size=page_size, dtype=dtype, device=torch.device(device))
        """[layers, 2, kv_heads, slots, head_dim]: a head's slots lie together, as attention reads them."""
        self.layers = [(layer[0], layer[1]) for layer in self.storage]
        """Keys and values of each layer, [kv_heads, slots, head_dim]: views, made once."""
        self.keeps_prefixes = False
        """Whether full pages stay known after `keep`, for requests that begin with the same tokens."""
        self._prefixes = PrefixIndex(page_size)
        self._pool = PagePool(self.num_pages, forget=self._prefixes.forget)
        self._live: set[KVHandle] = set()
        self._moves: list[tuple[int, int]] = []
        """Physical slots, from and to, that are still to be copied..."""
        self._moving: set[KVHandle] = set()
        """...and whose they are."""

    @property
    def free_pages(self) -> int:
        """Pages that no handle holds, those kept for their content included."""
        return self._pool.num_idle

    def num_pages_of(self, num_slots: int) -> int:
        """Pages that hold so many slots."""
        return -(-num_slots // self.page_size)

    def allocate(
        self,
        num_slots: int,
        *,
        max_slots: int = 0,
        token_ids: Sequence[int] = (),
        num_spare: int = 0,
    ) -> KVHandle:
        """Take pages for `num_slots` slots, in one run if that can be had. Raises `RequestError`.

        max_slots: what the handle may grow to.
        token_ids: what its first slots will hold. Pages that hold the same already are shared, but for the
            last token, which is always left to be computed.
        num_spare: pages that must be left over.
        """
        shared, digests = self._prefixes.match(token_ids[:-1]) if self.keeps_prefixes else ([], [])
        num_new = max(self.num_pages_of(num_slots) - len(shared), 0)
        num_taken = num_new + self._pool.num_idle_of(shared)
        if num_slots < 1 or num_taken + num_spare > self._pool.num_idle:
            raise RequestError(
                f"{num_slots} KV slots were asked for ({num_new} pages of {self.page_size}"
                f"{f' beside {len(shared)} shared ones' if shared else ''}), "
                f"{self._pool.num_idle} of {self.num_pages} pages are free; "
                "shorten the request or lower max_requests"
            )
        self._pool.hold(shared)
        pages, claim = list(shared), _NO_CLAIM
        if num_new:
            num_later = max(self.num_pages_of(max_slots) - len(shared), num_new)
            new, claim = self._take(num_new, after=shared[-1] if shared else None, span=num_later)
            pages += new
        handle = KVHandle(
            pages=pages,
            page_size=self.page_size,
            max_slots=max(max_slots, num_slots),
            digests=digests,
            device=self.storage.device,
        )
        self._set_claim(handle, claim)
        self._live.add(handle)
        return handle

    def grow(self, handle: KVHandle, num_slots: int) -> bool:
        """Have the handle hold at least `num_slots` slots. False, and nothing is changed, without room."""
        if num_slots <= handle.num_slots:
            return True
        assert handle in self._live, "a KV handle grows after it was freed"
        num_new = self.num_pages_of(num_slots) - len(handle.pages)
        if num_new > self._pool.num_idle:
            return False
        span = len(handle.claim)
        self._pool.unclaim(handle.claim)
        new, claim = self._take(num_new, after=handle.pages[-1], span=span)
        handle.extend(new)
        self._set_claim(handle, claim)
        return True

    def keep(self, handle: KVHandle, token_ids: Sequence[int]) -> None:
        """Make full pages known to later requests. token_ids: what the first slots hold, for good."""
        if not self.keeps_prefixes:
            return
        assert handle in self._live, "a KV handle was used after it was freed"
        for digest in self._prefixes.digests(token_ids, handle.digests):
            page = handle.pages[len(handle.digests)]
            handle.digests.append(digest)
            if self._prefixes.add(digest, page):
                self._pool.keep(page)

    def free(self, handle: KVHandle, token_ids: Sequence[int] = ()) -> None:
        """Give the pages back. A handle is freed once. token_ids: see `keep`."""
        assert handle in self._live, "a KV handle was freed twice, or belongs to another cache"
        self.keep(handle, token_ids)
        if handle in self._moving:
            self.finish_moves()
        self._live.remove(handle)
        self._pool.unclaim(handle.claim)
        self._pool.release(handle.pages)

    def move(self, handle: KVHandle, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy logical slots `src` to `dst` in all layers, reading all before writing any.

        Done in `finish_moves`, for all handles in one: somebody may wait for what comes after the move.
        src, dst: equally long; `dst` without repeats. Pairs with src == dst cost nothing.
        """
        assert len(src) == len(dst), f"{len(src)} slots cannot move to {len(dst)}"
        assert handle in self._live, "a KV handle was used after it was freed"
        pairs = [(a, b) for a, b in zip(src, dst, strict=True) if a != b]
        if not pairs:
            return
        first = min(b for _, b in pairs)
        assert first >= handle.num_frozen, f"slot {first} is written, {handle.num_frozen} are shared"
        if handle in self._moving:
            self.finish_moves()
        physical = handle.physical_list
        self._moves += [(physical[a], physical[b]) for a, b in pairs]
        self._moving.add(handle)

    def finish_moves(self) -> None:
        """Copy what `move` was told of; before anything else reads or writes the storage."""
        if not self._moves:
            return
        src, dst = torch.tensor(self._moves, device=self.storage.device).unbind(dim=1)
        move_kv(self.storage, src, dst)
        self._moves = []
        self._moving.clear()

    def read(self, layer: int, handle: KVHandle, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of logical slots 0..length-1, each [kv_heads, length, head_dim].

        length: may be up to a `READ_BLOCK` beyond the handle's end; what is read there means nothing.
        """
        assert not self._moves, "slots are read while some are to be moved"
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
        """Check that the cache is idle and whole: no handle is out, and nobody holds or claims a page."""
        held = [page for handle in self._live for page in handle.pages]
        if held:
            raise AssertionError(f"KV cache not idle: {len(self._live)} handles hold {len(held)} pages")
        self._pool.check_integrity(self._prefixes.pages)

    def _take(self, count: int, *, after: int | None, span: int) -> tuple[list[int], range]:
        """Pages, and the run behind them that the taker may grow into. span: see `PagePool.take`."""
        pages = self._pool.take(count, after=after, span=span)
        first = pages[0] if after is None else after + 1
        if pages != list(range(first, first + count)):
            return pages, _NO_CLAIM
        return pages, range(first + count, max(min(first + span, self.num_pages), first + count))

    def _set_claim(self, handle: KVHandle, claim: range) -> None:
        handle.claim = claim if handle.first_slot is not None else _NO_CLAIM
        self._pool.claim(handle.claim)
