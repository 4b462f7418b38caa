"""Gives KV pages to requests, of the target and of the draft: both, or none.

The target's cache is here; the draft's is the speculator's, and its pages are counted here by what the
speculator said it has. The counts are upper bounds: pages that requests share in the draft's cache count for
each of them. Knows nothing about rounds, and does not choose who has to wait.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from contextlib import suppress

from pipeline.errors import EngineDead, RequestError
from pipeline.messages import DraftCapacity
from stages.model.pages import KVCache, KVHandle
from stages.target_verifier.sequence import Sequence


class PageLedger:
    """What each admitted request holds."""

    def __init__(self, kv: KVCache, *, max_context: int, num_nodes: int, has_draft: bool) -> None:
        """num_nodes: slots that a request may need in the target's cache behind its committed tokens."""
        self._kv = kv
        self._max_context = max_context
        self._num_nodes = num_nodes
        self._draft: DraftCapacity | None = None
        self._draft_pages: dict[str, int] = {}
        """By `Sequence.draft_id`; empty where the draft has no KV cache."""
        self._num_draft_free = 0
        self.is_ready = not has_draft
        """Whether the draft has said what it has room for."""
        self._is_full = False
        """Whether there were too few for the first in line, and nobody gave any back since."""

    def set_draft(self, capacity: DraftCapacity) -> None:
        """What the draft has room for. Raises `EngineDead` if not even one request of full length fits."""
        self.is_ready = True
        if capacity.num_pages is None:
            return
        self._draft = capacity
        self._num_draft_free = capacity.num_pages
        if (needed := self._draft_need(self._max_context)) > capacity.num_pages:
            raise EngineDead(
                f"the draft's KV cache has {capacity.num_pages} pages, expected {needed} for one request of "
                f"model.max_context={self._max_context}; lower that, or what is speculated"
            )

    def open(
        self, draft_id: str, token_ids: Tokens[int], *, max_len: int, num_active: int
    ) -> KVHandle | None:
        """Pages for a request's committed tokens and its first round; None if there are too few.

        num_active: requests that hold pages; room for each of them to grow is left.
        """
        if self._is_full:
            return None
        num_committed = min(len(token_ids) + 1, max_len)
        num_draft = self._draft_need(num_committed)
        handle: KVHandle | None = None
        if self._draft is None or num_draft + num_active <= self._num_draft_free:
            with suppress(RequestError):  # it waits until others end
                handle = self._kv.allocate(
                    num_committed + self._num_nodes,
                    max_slots=max_len + self._num_nodes,
                    token_ids=token_ids,
                    num_spare=num_active,
                )
        assert handle is not None or num_active > 0, "one request of full length always fits"
        if handle is None:
            self._is_full = True
        elif self._draft is not None:
            self._draft_pages[draft_id] = num_draft
            self._num_draft_free -= num_draft
        return handle

    def ask_again(self) -> None:
        """Another request is the first in line, which may need fewer pages."""
        self._is_full = False

    def grow(self, sequence: Sequence) -> bool:
        """Pages for the round of the request's proposal, and for what the draft does after it.

        False, and nothing changed, if there are too few.
        """
        num_committed, num_proposed = len(sequence.token_ids), len(sequence.tree()[0])
        num_draft = self._draft_need(min(num_committed + num_proposed + 1, sequence.max_len))
        num_more = num_draft - self._draft_pages.get(sequence.draft_id, 0)
        if num_more > self._num_draft_free and self._draft is not None:
            return False
        if not self._kv.grow(sequence.kv, num_committed + num_proposed):
            return False
        if self._draft is not None:
            self._draft_pages[sequence.draft_id] = num_draft
            self._num_draft_free -= num_more
        return True

    def close(self, sequence: Sequence) -> None:
        """The request gives everything back. What it computed stays known while nobody needs the pages."""
        self._kv.keep(sequence.kv, sequence.token_ids[: sequence.num_computed])
        self.cancel(sequence.draft_id, sequence.kv)

    def cancel(self, draft_id: str, kv: KVHandle) -> None:
        """Pages that were opened are given back."""
        self._kv.free(kv)
        self._num_draft_free += self._draft_pages.pop(draft_id, 0)
        self._is_full = False

    def _draft_need(self, num_committed: int) -> int:
        """Pages of the draft for so many committed tokens and the nodes behind them."""
        draft = self._draft
        if draft is None:
            return 0
        num_read = num_committed if draft.max_position is None else min(num_committed, draft.max_position)
        return -(-(num_read + draft.num_nodes) // draft.page_size)
