"""Which pages of a KV cache are held, which are kept for what is in them, and which are taken next.

A page is *held* by one request or by several that share it, else it is *idle*. An idle page may be *kept*:
what is in it may be of use to a later request, until the page is needed. A *claim* marks the pages behind a
request that it is expected to grow into, so that its pages stay in one run; it keeps others away only while
there is room elsewhere. Knows nothing about tokens, slots or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_CLAIMED = 1 << 40
"""What a claim adds to the cost of a page: more than any time of use."""
_HELD = 1 << 50


class PagePool:
    """Counts of holders and claims, and times of use, by page."""

    def __init__(self, num_pages: int, *, forget: Callable[[int], None]) -> None:
        """forget: is told of every kept page that is taken for other content."""
        self.num_pages = num_pages
        self.num_idle = num_pages
        """Pages that nobody holds, kept ones included."""
        self._forget = forget
        self._holders = np.zeros(num_pages, dtype=np.int64)
        self._claims = np.zeros(num_pages, dtype=np.int64)
        self._last_used = np.zeros(num_pages, dtype=np.int64)
        """Of kept pages; 0 for the others."""
        self._is_kept = np.zeros(num_pages, dtype=np.bool_)
        self._clock = 0

    def num_idle_of(self, pages: Sequence[int]) -> int:
        """How many of these nobody holds."""
        return sum(self._holders[page] == 0 for page in pages)

    def take(self, count: int, *, after: int | None = None, span: int = 0) -> list[int]:
        """Hold `count` idle pages: those behind `after`, else a run, else the ones that were idle longest.

        after: the last page that the taker has. span: pages that it may need in the end, these included.
        """
        assert 0 < count <= self.num_idle, f"{count} pages are wanted, {self.num_idle} are idle"
        pages = self._choose(count, after=after, span=max(span, count))
        for page in pages:
            if self._is_kept[page]:
                self._forget(page)
                self._is_kept[page] = False
        self.hold(pages)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One holder more for each page."""
        for page in pages:
            self.num_idle -= int(self._holders[page] == 0)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less. Of kept pages the first of the list counts as used last: it is of most use."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is released, and nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self.num_idle += 1
                self._clock += 1
                self._last_used[page] = self._clock if self._is_kept[page] else 0

    def keep(self, page: int) -> None:
        """What is in a held page is worth keeping after it is released."""
        assert self._holders[page] > 0, f"page {page} is kept, and nobody holds it"
        self._is_kept[page] = True

    def claim(self, pages: range) -> None:
        """Somebody expects to grow into these."""
        self._claims[pages.start : pages.stop] += 1

    def unclaim(self, pages: range) -> None:
        """The end of a claim."""
        self._claims[pages.start : pages.stop] -= 1

    def check_integrity(self, kept: Sequence[int]) -> None:
        """Check that nobody holds or claims a page, and that `kept` are the kept ones."""
        assert self.num_idle == self.num_pages, f"{self.num_idle} of {self.num_pages} pages are idle"
        assert not self._holders.any(), f"pages {np.flatnonzero(self._holders).tolist()} are held"
        assert not self._claims.any(), f"pages {np.flatnonzero(self._claims).tolist()} are claimed"
        assert sorted(kept) == np.flatnonzero(self._is_kept).tolist(), "other pages are kept than are known"

    def _choose(self, count: int, *, after: int | None, span: int) -> list[int]:
        if after is not None:
            following = range(after + 1, after + 1 + count)
            if following.stop <= self.num_pages and not any(self._is_taken(page) for page in following):
                return list(following)
        cost = self._cost()
        for length, limit in ((span, _CLAIMED), (count, _CLAIMED), (count, _HELD)):
            first = _cheapest_run(cost, length)
            if first is not None and cost[first : first + length].max() < limit:
                return list(range(first, first + count))
        chosen: list[int] = np.argsort(cost, kind="stable")[:count].tolist()
        return sorted(chosen)

    def _is_taken(self, page: int) -> bool:
        return bool(self._holders[page] > 0 or self._claims[page] > 0)

    def _cost(self) -> NDArray[np.int64]:
        """What it costs to take each page."""
        dear = self._last_used + _CLAIMED * (self._claims > 0)
        return np.where(self._holders > 0, _HELD, dear)


def _cheapest_run(cost: NDArray[np.int64], length: int) -> int | None:
    """Where the run of `length` pages begins whose dearest page is cheapest, the first of several."""
    if length > len(cost):
        return None
    dearest, size = cost, 1  # dearest[i]: of the pages i .. i + size - 1
    while 2 * size <= length:
        dearest = np.maximum(dearest[:-size], dearest[size:])
        size *= 2
    rest = length - size
    return int(np.argmin(np.maximum(dearest[: len(dearest) - rest], dearest[rest:])))
