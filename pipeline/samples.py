"""Several samples of one prompt: each is a request of its own, told apart by its seed.

So a sample does not depend on how many were asked for, nor on what ran beside it.
"""

from __future__ import annotations

import hashlib

_SEED_BYTES = 8
_SEED_BITS = 53
"""Derived seeds stay exact in every JSON reader, as drawn ones do."""


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index`, counted from 0: the given one for the first, hashed from both for others.

    seed: 0 <= seed < 2**63. Returns less than 2**53 for every sample but the first.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "little") >> (8 * _SEED_BYTES - _SEED_BITS)


def sample_id(request_id: str, index: int, *, num_samples: int) -> str:
    """The request id of a sample: that of the request, with the index where there are several."""
    return request_id if num_samples == 1 else f"{request_id}/{index}"
