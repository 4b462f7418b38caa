"""One request's sampling law and noise, as target and draft both apply them to rows of logits.

Owns a small cache of noise rows: noise depends on the position alone, so all rows of one position share
it, and it can be made before the logits are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.noise import gumbel_noise
from kernels.sampling import sampling_law
from pipeline.messages import Sampling


class TokenLaw:
    """Perturbed logits of one request: the target chooses their arg-max, the draft proposes their top."""

    def __init__(self, sampling: Sampling, vocab_ids: Tensor) -> None:
        """vocab_ids: [V] int64, the target's id of each logit column."""
        self._sampling = sampling
        self._vocab_ids = vocab_ids
        self._noise_by_position: dict[int, Tensor] = {}

    @property
    def is_greedy(self) -> bool:
        """Temperature 0: no noise, no filters."""
        return self._sampling.temperature == 0.0

    def noise(self, position: int, dtype: torch.dtype) -> Tensor:
        """Noise [V] for choosing the token at absolute `position`."""
        row = self._noise_by_position.get(position)
        if row is None:
            row = gumbel_noise(self._sampling.seed, position, self._vocab_ids).to(dtype)
            self._noise_by_position[position] = row
        return row

    def has_noise(self, position: int) -> bool:
        """Whether the noise of `position` is ready, or not needed."""
        return self.is_greedy or position in self._noise_by_position

    def forget_before(self, position: int) -> None:
        """Drop noise of positions that are committed."""
        for old in [p for p in self._noise_by_position if p < position]:
            del self._noise_by_position[old]

    def perturb(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Log law plus noise.

        logits:    [T, V] float32 or float64.
        positions: for each row the absolute position of the token that the row chooses.
        Returns [T, V]; -inf for excluded tokens. Greedy rows come back as they are.
        """
        if self.is_greedy:
            return logits
        sampling = self._sampling
        law = sampling_law(
            logits,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        for row, position in zip(law, positions, strict=True):
            row.add_(self.noise(position, law.dtype))
        return law
