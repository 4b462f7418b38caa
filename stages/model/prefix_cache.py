"""Finds pages whose keys and values a new request can use: full pages, by the tokens up to their end.

A page is known by a digest of its own tokens and, through the digest of the page before it, of all tokens
before it: keys and values depend on all of them. Owns the digests; who holds which page is the pool's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

_DIGEST_SIZE = 16
_START = b""
"""What stands for the page before the first."""


class PrefixIndex:
    """Kept pages by digest."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_by_digest: dict[bytes, int] = {}
        self._digest_by_page: dict[int, bytes] = {}

    @property
    def pages(self) -> list[int]:
        """All pages that are known."""
        return list(self._digest_by_page)

    def digests(self, token_ids: Sequence[int], known: Sequence[bytes] = ()) -> Iterator[bytes]:
        """Of the full pages of a text, in order; `known` are those of its first pages, which are left out."""
        size, digest = self._page_size, known[-1] if known else _START
        for index in range(len(known), len(token_ids) // size):
            tokens = array("q", token_ids[index * size : (index + 1) * size])
            digest = hashlib.blake2b(digest + tokens.tobytes(), digest_size=_DIGEST_SIZE).digest()
            yield digest

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """The longest run of known pages that the text begins with, and their digests."""
        pages: list[int] = []
        digests: list[bytes] = []
        for digest in self.digests(token_ids):
            page = self._page_by_digest.get(digest)
            if page is None:
                break
            pages.append(page)
            digests.append(digest)
        return pages, digests

    def add(self, digest: bytes, page: int) -> bool:
        """Make a page known. False if another one with the same content is known already."""
        if digest in self._page_by_digest:
            return False
        self._page_by_digest[digest] = page
        self._digest_by_page[page] = digest
        return True

    def forget(self, page: int) -> None:
        """The page gets other content."""
        del self._page_by_digest[self._digest_by_page.pop(page)]
