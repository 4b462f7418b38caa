"""The name of a tensor in a pool, as messages carry it; apart from pools, so that clients import no numpy."""

from __future__ import annotations

import msgspec


class TensorRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names one version of one slot of a `pipeline.tensor_pool.TensorPool`."""

    pool: str
    slot: int
    generation: int
