"""The target over a fixed number of rows with one static KV block: what `write` decodes with.

Rows are independent answers of different lengths. Prompts are read once and copied into all the rows that
answer them. Made for throughput; the engine's own runner is made for latency. Logits agree with it up to
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.model.decoder import rms_norm, rotary_table, rotate
from stages.model.linear import Linear
from stages.model.shape import ModelShape
from stages.model.weights import Affine, LayerWeights, LoadedModel


class BatchDecoder:
    """`num_rows` sequences of up to `num_slots` tokens."""

    def __init__(
        self, model: LoadedModel, *, num_rows: int, num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        shape, weights = model.shape, model.weights
        self._shape = shape
        self._device = torch.device(device)
        dtype = weights.embed.dtype
        self._embed = weights.embed.to(self._device)
        self._final_norm = weights.final_norm.to(self._device)
        self._head = Linear(Affine(weight=weights.head.to(self._device), bias=None))
        self._layers = [_Layer(layer, self._device) for layer in weights.layers]
        self._cos, self._sin = rotary_table(shape, num_slots, dtype, self._device)
        size = (shape.num_layers, 2, num_rows, shape.num_kv_heads, num_slots, shape.head_dim)
        self._kv = torch.zeros(size, dtype=dtype, device=self._device)
        self._slots = torch.arange(num_slots, device=self._device)
        self._all_rows = torch.arange(num_rows, device=self._device)

    @torch.inference_mode()
    def read(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], owner: Sequence[int]) -> Tensor:
        """Read prompts into rows: row rows[i] gets prompts[owner[i]]. Returns logits [len(rows), V].

        Pads on the right to the longest prompt; what pads leave in the KV is overwritten before it is seen.
        """
        shape = self._shape
        num, longest = len(prompts), max(map(len, prompts))
        ids = torch.zeros(num, longest, dtype=torch.int64)
        for index, prompt in enumerate(prompts):
            ids[index, : len(prompt)] = torch.tensor(prompt)
        hidden = self._embed[ids.to(self._device).flatten()]
        cos = self._cos[:longest].repeat(num, 1).unsqueeze(1)
        sin = self._sin[:longest].repeat(num, 1).unsqueeze(1)
        row_index = torch.tensor(rows, device=self._device)
        owner_index = torch.tensor(owner, device=self._device)
        for index, layer in enumerate(self._layers):
            queries, keys, values = layer.project(shape, hidden, cos, sin)
            queries, keys, values = (
                heads.view(num, longest, -1, shape.head_dim).transpose(1, 2)
                for heads in (queries, keys, values)
            )
            self._kv[index, 0, row_index, :, :longest] = keys[owner_index]
            self._kv[index, 1, row_index, :, :longest] = values[owner_index]
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            hidden = layer.finish(shape, hidden, attended.transpose(1, 2).reshape(num * longest, -1))
        last = torch.tensor([i * longest + len(p) - 1 for i, p in enumerate(prompts)], device=self._device)
        return self._logits(hidden[last])[owner_index]

    @torch.inference_mode()
    def step(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Read one more token in every row.

        token_ids, lengths: int64 [rows]; lengths: tokens the row had before, where the new one goes.
        Returns logits [rows, V].
        """
        shape = self._shape
        num = len(token_ids)
        longest = int(lengths.max()) + 1
        token_ids, lengths = token_ids.to(self._device), lengths.to(self._device)
        hidden = self._embed[token_ids]
        cos, sin = self._cos[lengths].unsqueeze(1), self._sin[lengths].unsqueeze(1)
        mask = torch.zeros(num, 1, 1, longest, dtype=hidden.dtype, device=self._device)
        mask.masked_fill_((self._slots[:longest] > lengths[:, None])[:, None, None], -torch.inf)
        for index, layer in enumerate(self._layers):
            queries, keys, values = layer.project(shape, hidden, cos, sin)
            all_keys, all_values = self._kv[index, 0], self._kv[index, 1]
            all_keys[self._all_rows, :, lengths] = keys
            all_values[self._all_rows, :, lengths] = values
            # The query heads of one group are taken as so many queries of their key head.
            attended = F.scaled_dot_product_attention(
                queries.view(num, shape.num_kv_heads, shape.group_size, shape.head_dim),
                all_keys[:, :, :longest],
                all_values[:, :, :longest],
                attn_mask=mask,
            )
            hidden = layer.finish(shape, hidden, attended.reshape(num, -1))
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(rms_norm(hidden, self._final_norm, self._shape.rms_norm_eps))


class _Layer:
    def __init__(self, weights: LayerWeights, device: torch.device) -> None:
        def linear(affine: Affine) -> Linear:
            bias = None if affine.bias is None else affine.bias.to(device)
            return Linear(Affine(weight=affine.weight.to(device), bias=bias))

        self._qkv, self._o = linear(weights.qkv), linear(weights.o)
        self._gate_up, self._down = linear(weights.gate_up), linear(weights.down)
        self._input_norm, self._post_norm = weights.input_norm.to(device), weights.post_norm.to(device)
        self._q_norm = None if weights.q_norm is None else weights.q_norm.to(device)
        self._k_norm = None if weights.k_norm is None else weights.k_norm.to(device)

    def project(
        self, shape: ModelShape, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values, each [T, heads, head_dim]."""
        normed = rms_norm(hidden, self._input_norm, shape.rms_norm_eps)
        heads = self._qkv(normed).view(hidden.shape[0], -1, shape.head_dim)
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        queries, keys, values = heads.split(sizes, dim=1)  # type: ignore[no-untyped-call]
        if self._q_norm is not None and self._k_norm is not None:
            queries = rms_norm(queries, self._q_norm, shape.rms_norm_eps)
            keys = rms_norm(keys, self._k_norm, shape.rms_norm_eps)
        rotated = rotate(torch.cat((queries, keys), dim=1), cos, sin)
        return rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], values

    def finish(self, shape: ModelShape, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer behind the attention."""
        hidden = hidden + self._o(attended)
        gate, up = self._gate_up(rms_norm(hidden, self._post_norm, shape.rms_norm_eps)).chunk(2, dim=-1)
        return hidden + self._down(F.silu(gate).mul_(up))
