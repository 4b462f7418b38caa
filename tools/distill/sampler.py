"""Chooses tokens for many rows at once, each at its own temperature, and keeps the likeliest ones.

Exact and without a sort or noise over the whole vocabulary: the row is cut into blocks, a block is drawn by
its mass, then a token in it; the k likeliest tokens lie in the k blocks with the highest maxima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Of one step."""

    token_ids: Tensor
    """int64 [rows]."""
    top_ids: Tensor
    """int32 [rows, k], likeliest first."""
    top_logprobs: Tensor
    """float16 [rows, k], at temperature 1."""


class Sampler:
    """Owns its generator; the same seed and calls give the same tokens."""

    def __init__(self, *, seed: int, top_tokens: int, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._top_tokens = top_tokens

    @torch.inference_mode()
    def choose(self, logits: Tensor, temperatures: Tensor) -> Choice:
        """logits: [rows, V]. temperatures: [rows] on the same device, 0 = greedy."""
        rows, vocab = logits.shape
        scores = logits.float()
        if vocab % _BLOCK:
            scores = torch.nn.functional.pad(scores, (0, _BLOCK - vocab % _BLOCK), value=-torch.inf)
        blocks = scores.view(rows, -1, _BLOCK)
        maxima = blocks.amax(dim=-1)
        count = min(self._top_tokens, vocab)
        num_blocks = min(count, blocks.shape[1])
        best_blocks = maxima.topk(num_blocks, dim=-1).indices
        candidates = blocks.gather(1, best_blocks[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
        top_scores, places = candidates.topk(count, dim=-1)
        top_ids = best_blocks.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
        peak = top_scores[:, :1]
        masses = (blocks - peak[:, :, None]).exp_()
        log_total = masses.sum(dim=(1, 2)).log_()
        token_ids = top_ids[:, 0].clone()
        warm = temperatures.nonzero().squeeze(1)
        if len(warm):
            token_ids[warm] = self._draw(masses[warm].pow_(1 / temperatures[warm, None, None]))
        return Choice(
            token_ids=token_ids,
            top_ids=top_ids.to(torch.int32),
            top_logprobs=(top_scores - peak - log_total[:, None]).to(torch.float16),
        )

    def _draw(self, masses: Tensor) -> Tensor:
        """masses: [n, blocks, block], unnormalised. Returns ids [n]."""
        block = torch.multinomial(masses.sum(dim=-1), 1, generator=self._generator)
        inside = masses.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
        place = torch.multinomial(inside, 1, generator=self._generator)
        return (block * _BLOCK + place).squeeze(1)
