"""Fixed pools of equal tensors that one stage writes and others read, named in messages by `TensorRef`.

A pool has `num_slots` slots of one shape and dtype. Its owner writes a slot and gets a reference with
the slot's new generation; a reader that comes after the slot was written again gets `StaleTensor`, never
the wrong numbers. numpy only: stages that use torch wrap the arrays with `torch.from_numpy`.
"""

from __future__ import annotations

import msgspec


class TensorRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names one version of one slot of a pool."""

    pool: str
    slot: int
    generation: int


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool holds."""

    name: str
    num_slots: int
    shape: tuple[int, ...]
    """Shape of one slot."""
    dtype: str
    """A numpy dtype name."""


class TensorPool:
    """To be written by the runtime work: write(array) -> TensorRef, read(ref) -> array (a copy)."""
