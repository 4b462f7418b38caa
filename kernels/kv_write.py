"""Writing and moving rows of a KV cache, whose storage is [layers, 2, kv_heads, slots, head_dim]."""

from __future__ import annotations

from torch import Tensor


def write_kv(layer: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: slice | Tensor) -> None:
    """Write the keys and values of new rows into one layer, in place.

    layer:  its keys and its values, each [kv_heads, slots, head_dim].
    keys, values: [T, kv_heads, head_dim].
    slots:  physical slots of the rows, as a slice of length T (one plain copy) or int64 [T], all distinct.
    """
    if isinstance(slots, slice):
        layer[0][:, slots].copy_(keys.transpose(0, 1))
        layer[1][:, slots].copy_(values.transpose(0, 1))
    else:
        layer[0].index_copy_(1, slots, keys.transpose(0, 1))
        layer[1].index_copy_(1, slots, values.transpose(0, 1))


def move_kv(storage: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slots `src` to `dst` in every layer, in place: everything is read before anything is written.

    storage: [layers, 2, kv_heads, slots, head_dim].
    src, dst: int64 [N] physical slots; `dst` distinct. The two may overlap.
    """
    storage.index_copy_(3, dst, storage.index_select(3, src))
