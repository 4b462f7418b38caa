"""The draft as training sees it: padded batches of whole sequences in, hidden states of some rows out.

Weights are named tensors of a checkpoint, so that they start from the target's and are saved as they are.
No KV cache: `stages.model.decoder` computes the same from saved weights, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import ConfigError
from stages.model.decoder import rotary_table
from stages.model.shape import ModelShape, read_shape
from stages.model.weights import expected_tensors, read_tensors

HEAD_NAME = "lm_head.weight"
NORM_NAME = "model.norm.weight"
EMBED_NAME = "model.embed_tokens.weight"

Tensors = Mapping[str, Tensor]


def default_layers(num_layers: int) -> list[int]:
    """The target's first two and last two layers."""
    return sorted({0, min(1, num_layers - 1), max(num_layers - 2, 0), num_layers - 1})


def initial_tensors(
    target_folder: Path, layers: Sequence[int], head_token_ids: Tensor
) -> tuple[ModelShape, dict[str, Tensor], Tensor]:
    """The draft's shape, its float32 weights taken from the target, and the target's embedding.

    Raises `ConfigError` for layers that the target does not have.
    """
    shape = read_shape(target_folder)
    layers = list(layers) or default_layers(shape.num_layers)
    if not all(0 <= layer < shape.num_layers for layer in layers):
        raise ConfigError(f"layers={layers}: expected numbers from 0 to {shape.num_layers - 1}")
    tensors: dict[str, Tensor] = {}
    draft_shape = replace(shape, num_layers=len(layers), tie_embeddings=False)
    head_source = EMBED_NAME if shape.tie_embeddings else HEAD_NAME
    wanted = [name for name in expected_tensors(shape) if _layer_of(name) in {None, *layers}]
    loaded = read_tensors(target_folder, wanted, dtype=torch.float32)
    for index, layer in enumerate(layers):
        for name in wanted:
            if _layer_of(name) == layer:
                rest = name.split(".", 3)[3]
                tensors[f"model.layers.{index}.{rest}"] = loaded[name].clone()
    tensors[NORM_NAME] = loaded[NORM_NAME].clone()
    tensors[HEAD_NAME] = loaded[head_source][head_token_ids].clone()
    return draft_shape, tensors, loaded[EMBED_NAME]


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


class DraftNetwork:
    """Forward over given weights; holds only what is not trained."""

    def __init__(
        self, shape: ModelShape, embed: Tensor, *, num_positions: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self._shape = shape
        self._embed = embed.to(device, dtype)
        self._cos, self._sin = rotary_table(shape, num_positions, torch.float32, torch.device(device))

    def hidden(self, tensors: Tensors, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Normed hidden states of some rows.

        token_ids: int64 [B, S], padded on the right. rows: int64 [N] into the flattened batch.
        Returns [N, hidden]; multiplied with the head they are logits.
        """
        batch, length = token_ids.shape
        hidden = self._embed[token_ids.flatten()]
        cos = self._cos[:length].to(hidden.dtype)
        sin = self._sin[:length].to(hidden.dtype)
        last = self._shape.num_layers - 1
        for index in range(self._shape.num_layers):
            layer = _layer_tensors(tensors, index)
            hidden = layer_forward(
                hidden, cos, sin, rows if index == last else None, self._shape, layer, batch
            )
        return norm_rows(hidden, tensors[NORM_NAME], self._shape.rms_norm_eps)


def layer_forward(
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    shape: ModelShape,
    layer: Mapping[str, Tensor],
    batch: int,
) -> Tensor:
    """hidden [B * S, hidden] -> the same, or [N, hidden] of `rows`: what lies behind attention is theirs."""
    length = hidden.shape[0] // batch
    normed = norm_rows(hidden, layer["input_layernorm.weight"], shape.rms_norm_eps)

    def project(name: str, num_heads: int) -> Tensor:
        heads = _linear(normed, layer, f"self_attn.{name}_proj")
        return heads.view(batch, length, num_heads, shape.head_dim).transpose(1, 2)

    queries, keys = project("q", shape.num_heads), project("k", shape.num_kv_heads)
    values = project("v", shape.num_kv_heads)
    if shape.qk_norm:
        queries = norm_rows(queries, layer["self_attn.q_norm.weight"], shape.rms_norm_eps)
        keys = norm_rows(keys, layer["self_attn.k_norm.weight"], shape.rms_norm_eps)
    attended = causal_attention(_rotate(queries, cos, sin), _rotate(keys, cos, sin), values)
    if rows is not None:
        attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
    hidden = hidden + _linear(attended, layer, "self_attn.o_proj")
    normed = norm_rows(hidden, layer["post_attention_layernorm.weight"], shape.rms_norm_eps)
    gate, up = _linear(normed, layer, "mlp.gate_proj"), _linear(normed, layer, "mlp.up_proj")
    gated: Tensor = GatedSilu.apply(gate, up)  # type: ignore[no-untyped-call]
    return hidden + _linear(gated, layer, "mlp.down_proj")


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """queries [B, H, S, D]; keys, values [B, G, S, D] -> [B * S, H * D].

    The heads of a group are stacked over their keys: three plain products, which on a CPU take half the
    time of the fused kernel forward and backward, at lengths of a few hundred.
    """
    batch, num_heads, length, head_dim = queries.shape
    num_groups = keys.shape[1]
    per_group = num_heads // num_groups
    mask = torch.full((length, length), -torch.inf, dtype=queries.dtype, device=queries.device).triu_(1)
    scores = torch.baddbmm(
        mask.repeat(per_group, 1).expand(batch * num_groups, per_group * length, length),
        queries.reshape(batch * num_groups, per_group * length, head_dim),
        keys.reshape(batch * num_groups, length, head_dim).transpose(1, 2),
        alpha=head_dim**-0.5,
    )
    attended = torch.bmm(scores.softmax(dim=-1), values.reshape(batch * num_groups, length, head_dim))
    heads = attended.view(batch, num_heads, length, head_dim)
    return heads.transpose(1, 2).reshape(batch * length, num_heads * head_dim)


def _layer_tensors(tensors: Tensors, index: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _linear(rows: Tensor, layer: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(rows, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


def norm_rows(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, with a backward of few passes."""
    out: Tensor = _RmsNorm.apply(rows, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [B, H, S, D]; cos, sin [S, D], sin negative in its first half."""
    return heads * cos + torch.roll(heads, heads.shape[-1] // 2, dims=-1) * sin


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * w. Saves x and 1/rms; autograd's own composite form keeps five float32 copies."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        wide = rows.float() if rows.dtype == torch.bfloat16 else rows
        scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, weight, scale)
        return (wide * scale).to(rows.dtype) * weight

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        rows, weight, scale = ctx.saved_tensors
        wide = scale.dtype
        unit = rows.to(wide) * scale
        grad = grads[0].to(wide)
        grad_weight = (grad * unit).flatten(0, -2).sum(dim=0).to(weight.dtype)
        grad = grad * weight.to(wide)
        inner = (grad * unit).mean(dim=-1, keepdim=True)
        return grad.addcmul_(unit, inner, value=-1).mul_(scale).to(rows.dtype), grad_weight, None


class GatedSilu(torch.autograd.Function):
    """silu(gate) * up, saving its inputs only."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, grads[0] * F.silu(gate)
