"""Attention of a few new rows over a long cached context, and of a prompt over itself.

Words: a sequence has `length` cached slots, the last `tail` of which are under a mask; the slots before
them are *dense*, seen by every row. Query heads that share a key/value head are folded into rows, so that
keys and values are never repeated. Scores and their sums are accumulated in float32 or better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

READ_BLOCK = 64
"""Slots: a short sequence is read in whole blocks, those behind its end masked. See `plan_visibility`."""
_MAX_JOINT_BIAS = 1 << 20
"""Elements up to which the bias is widened with zeros over the dense part, see `plan_visibility`."""
_MAX_MASKED_CHAIN = 64
"""Rows up to which a causal chain is masked explicitly; longer ones (prompts) run the causal kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """Which slots each row of one sequence attends to; made once a forward, used in every layer."""

    length: int
    """Slots that are read, from slot 0. With a joint bias a multiple of `READ_BLOCK`: those behind the end of
    the sequence may hold any finite numbers."""
    dense_len: int
    """Slots 0..dense_len-1 are seen by every row and are under no bias."""
    bias: Tensor | None
    """[T * group, length - dense_len], 0 or -inf, rows folded (row-major over rows, then heads). None: the
    slots after `dense_len` are the rows themselves, as a causal chain."""


def plan_visibility(
    *, num_rows: int, length: int, mask: Tensor | None, group_size: int, dtype: torch.dtype
) -> Visibility:
    """Prepare the attention of one sequence.

    mask: bool [T, S] over the last S slots, True = may attend; every row sees at least itself. None: the
        rows are a causal chain in the last T slots, and see all before.

    A short bias is widened with zeros over the dense part: one kernel call then does what else takes
    two and a merge. It is also widened to whole blocks. The kernel's order of summation follows the number of
    slots, so that in whole blocks a row's result is the same to the last bit whatever rows share the forward;
    without them a token that was verified beside others could differ from the same token decoded alone.
    Beyond `_MAX_JOINT_BIAS` elements the parts stay apart and no O(context) mask exists.
    """
    if mask is None:
        if num_rows > _MAX_MASKED_CHAIN:
            return Visibility(length=length, dense_len=length - num_rows, bias=None)
        mask = torch.ones(num_rows, num_rows, dtype=torch.bool).tril_()
    tail_len = mask.shape[1]
    dense_len = length - tail_len
    if num_rows * group_size * length <= _MAX_JOINT_BIAS:
        padded = -(-length // READ_BLOCK) * READ_BLOCK
        bias = torch.zeros(num_rows, padded, dtype=dtype, device=mask.device)
        bias[:, dense_len:length].masked_fill_(~mask, float("-inf"))
        bias[:, length:] = float("-inf")
        length, dense_len = padded, 0
    else:
        bias = torch.zeros(num_rows, tail_len, dtype=dtype, device=mask.device)
        bias.masked_fill_(~mask, float("-inf"))
    return Visibility(length=length, dense_len=dense_len, bias=bias.repeat_interleave(group_size, dim=0))


def attend(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
    """Scaled dot-product attention of one sequence.

    queries: [T, heads, head_dim].
    keys, values: [kv_heads, visibility.length, head_dim], any strides with a dense last dimension.
    Returns [T, heads * head_dim] in the dtype of the queries.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    group_size = num_heads // num_kv_heads
    dense_len = visibility.dense_len
    folded = (
        queries.view(num_rows, num_kv_heads, group_size, head_dim)
        .transpose(0, 1)
        .reshape(num_kv_heads, num_rows * group_size, head_dim)
    )
    parts = []
    if dense_len:
        parts.append(_flash(folded, keys[:, :dense_len], values[:, :dense_len], bias=None))
    if dense_len < visibility.length:
        tail_keys, tail_values = keys[:, dense_len:], values[:, dense_len:]
        if visibility.bias is not None:
            parts.append(_flash(folded, tail_keys, tail_values, bias=visibility.bias))
        else:
            parts.append(_causal(queries, tail_keys, tail_values))
    out = parts[0][0] if len(parts) == 1 else _merge(parts[0], parts[1])
    return (
        out.view(num_kv_heads, num_rows, group_size, head_dim)
        .transpose(0, 1)
        .reshape(num_rows, num_heads * head_dim)
    )


def attend_reference(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The slow twin of `attend`, from the definition: mask is bool [T, length], True = may attend."""
    group_size = queries.shape[1] // keys.shape[0]
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    repeated_keys = keys.to(wide).repeat_interleave(group_size, dim=0)
    repeated_values = values.to(wide).repeat_interleave(group_size, dim=0)
    scores = torch.einsum("thd,hld->htl", queries.to(wide), repeated_keys) / queries.shape[2] ** 0.5
    probs = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("htl,hld->thd", probs, repeated_values).flatten(1).to(queries.dtype)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, *, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """[H, T, D] over [H, L, D] -> output [H, T, D] and log-sum-exp of the scaled scores [H, T]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries[None], keys[None], values[None], 0.0, False, attn_mask=bias
    )
    return out[0], lse[0]


def _causal(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """A chain over itself, [T, heads, D] over [kv_heads, T, D], folded like `_flash`'s result."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    group_size = num_heads // num_kv_heads
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries.transpose(0, 1)[None],
        keys.repeat_interleave(group_size, dim=0)[None],
        values.repeat_interleave(group_size, dim=0)[None],
        0.0,
        True,
    )
    folded = out[0].view(num_kv_heads, group_size, num_rows, head_dim).transpose(1, 2)
    folded_lse = lse[0].view(num_kv_heads, group_size, num_rows).transpose(1, 2)
    return folded.reshape(num_kv_heads, -1, head_dim), folded_lse.reshape(num_kv_heads, -1)


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Join attention over two disjoint parts of the context by their log-sum-exps."""
    share = torch.sigmoid(second[1] - first[1]).unsqueeze(-1)
    return torch.lerp(first[0].to(share.dtype), second[0].to(share.dtype), share).to(first[0].dtype)
