"""The decoder of the Llama family, over packed rows. A reader can hold it whole; transformers is its judge.

Owns the packed weights and the rotary table. Does not own the KV cache, and takes what each row attends
to as given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import Visibility, attend
from kernels.kv_write import write_kv
from stages.model.cpu_kernels import NativeKernels
from stages.model.linear import Linear
from stages.model.pages import KVCache, KVHandle
from stages.model.shape import ModelShape
from stages.model.weights import Affine, LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """One request's share of a forward, made ready for all layers."""

    rows: slice
    kv: KVHandle
    write_slots: slice | Tensor
    visibility: Visibility


class Decoder:
    """Token ids in, logits out."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        weights: ModelWeights,
        dtype: torch.dtype,
        num_positions: int,
        kernels: NativeKernels | None = None,
    ) -> None:
        """num_positions: rows of the rotary table; positions must stay below. kernels: None for PyTorch's."""
        self.shape = shape
        self.embed = weights.embed
        self.layers = [DecoderLayer(shape, layer, kernels) for layer in weights.layers]
        self.final_norm = weights.final_norm
        self.head = Linear(Affine(weight=weights.head, bias=None), kernels)
        self.cos, self.sin = rotary_table(shape, num_positions, dtype, weights.embed.device)

    @property
    def head_size(self) -> int:
        """Logits of a row."""
        return self.head.num_outputs

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plans: Sequence[SequencePlan],
        cache: KVCache,
        logit_rows: Tensor | None,
    ) -> Tensor:
        """Run the rows, writing their keys and values into `cache`.

        token_ids, positions: int64 [T]. logit_rows: int64 [R] or None for all.
        Returns logits [R, vocab] in the dtype of the weights.
        """
        hidden = self.embed.index_select(0, token_ids)
        cos = self.cos.index_select(0, positions).unsqueeze(1)
        sin = self.sin.index_select(0, positions).unsqueeze(1)
        for index, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, cos, sin, index, plans, cache)
        if logit_rows is not None:
            if len(logit_rows) == 0:
                return hidden.new_empty(0, self.head_size)
            hidden = hidden.index_select(0, logit_rows)
        return self.head(rms_norm(hidden, self.final_norm, self.shape.rms_norm_eps))


class DecoderLayer:
    """Attention and gated MLP, each after a norm and added to the residual."""

    def __init__(self, shape: ModelShape, weights: LayerWeights, kernels: NativeKernels | None) -> None:
        self._shape = shape
        self._num_qk_heads = shape.num_heads + shape.num_kv_heads
        self.input_norm = weights.input_norm
        self.post_norm = weights.post_norm
        self.q_norm = weights.q_norm
        self.k_norm = weights.k_norm
        self.qkv = Linear(weights.qkv, kernels)
        self.o = Linear(weights.o, kernels)
        self.gate_up = Linear(weights.gate_up, kernels)
        self.down = Linear(weights.down, kernels)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: int,
        plans: Sequence[SequencePlan],
        cache: KVCache,
    ) -> Tensor:
        """hidden [T, hidden], cos and sin [T, 1, head_dim] -> [T, hidden]."""
        shape = self._shape
        normed = rms_norm(hidden, self.input_norm, shape.rms_norm_eps)
        heads = self.qkv(normed).view(hidden.shape[0], -1, shape.head_dim)
        rotated = rotate(self._normalise_heads(heads[:, : self._num_qk_heads]), cos, sin)
        queries, keys = rotated[:, : shape.num_heads], rotated[:, shape.num_heads :]
        values = heads[:, self._num_qk_heads :]
        attended = []
        for plan in plans:
            write_kv(cache.layers[index], keys[plan.rows], values[plan.rows], plan.write_slots)
            all_keys, all_values = cache.read(index, plan.kv, plan.visibility.length)
            attended.append(attend(queries[plan.rows], all_keys, all_values, plan.visibility))
        hidden = hidden + self.o(attended[0] if len(attended) == 1 else torch.cat(attended))
        normed = rms_norm(hidden, self.post_norm, shape.rms_norm_eps)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate).mul_(up))

    def _normalise_heads(self, heads: Tensor) -> Tensor:
        """qwen3 normalises every query and key head before the rotation. [T, q + k heads, head_dim]."""
        if self.q_norm is None or self.k_norm is None:
            return heads
        queries, keys = heads[:, : self._shape.num_heads], heads[:, self._shape.num_heads :]
        eps = self._shape.rms_norm_eps
        return torch.cat((rms_norm(queries, self.q_norm, eps), rms_norm(keys, self.k_norm, eps)), dim=1)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) in float32 (float64 for float64 rows), rounded to the dtype of the rows, times weight.

    The weight comes after the rounding, as in transformers; handing it to the kernel would round once
    less and change a quarter of the bfloat16 results.
    """
    return F.rms_norm(rows, (rows.shape[-1],), None, eps).mul_(weight)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding. heads [T, heads, dim]; cos, sin [T, 1, dim], sin negative in its first half."""
    return torch.addcmul(heads * cos, torch.roll(heads, heads.shape[-1] // 2, dims=-1), sin)


def rotary_table(
    shape: ModelShape, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim], computed in float32 as transformers does.

    The first half of sin is negated, so that rotating is one multiply-add of the swapped halves.
    """
    inv_freq = torch.tensor(shape.rope_inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * inv_freq
    cos = angles.cos() * shape.rope_attention_scaling
    sin = angles.sin() * shape.rope_attention_scaling
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
