"""The laws of an emulated target and its draft: pure functions of the context.

A context is a 64-bit hash of its tokens, and whether its next token is an *easy* or a *hard* one: a Markov
chain along the text, so that both come in stretches. The target ranks 64 candidates, drawn by the hash:

    logit of the candidate of rank i (1, 2, ...) = -draft_error * beta * log i     target
                                                 = that + draft_error * g_i        draft; g_i: Gumbel noise

The draft's best token is then the target's best with probability 1 / zeta(beta), zeta over 64 ranks (the
Gumbel-max identity). beta is log-normal from token to token, with deviation `spread`, around a median that
is fitted to the wanted acceptance, apart for easy and hard tokens. So where the target is sure of its token
the draft is sure too, and right; where the draft is wrong, the target's token stands near the top of its
list, with a tail like a power law; and at temperature 1 the flat rows lose most, the more so as the draft has
other tokens in place of a share of the target's candidates (`draft_blindness`). Everything else is left out:
text does not repeat itself, and a look-up in it finds nothing.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from conf.schema import EmulatedConfig
from kernels.noise import gumbel_noise_for_seeds, stream_key

NUM_CANDIDATES = 64
_FLOOR, _LEAST = -80.0, -60.0
"""Logits of a token that is no candidate, and least of a candidate. Below, exp would be ten times slower."""
_MOST_BETA = 100.0
"""The rank after the first is then 2**-100 as likely."""
_MASK63 = (1 << 63) - 1
_STREAM_STATE, _STREAM_LOGITS = 1, 2
"""Positions of `kernels.noise` are used as names of independent streams."""


class EmulatedLaw:
    """Logits of both models. Each process makes its own from the same settings, and they agree."""

    def __init__(self, config: EmulatedConfig) -> None:
        self._config = config
        self._ranks = torch.arange(NUM_CANDIDATES)
        self._log_ranks = torch.arange(1, NUM_CANDIDATES + 1, dtype=torch.float64).log()
        self._median_betas = torch.tensor(
            [
                fit_beta(config.hard_acceptance, spread=config.spread),
                fit_beta(config.easy_acceptance, spread=config.spread),
            ],
            dtype=torch.float64,
        )
        # Drawn for each row: beta, two numbers for the ids; of the draft also error and blindness by rank.
        self._columns = torch.arange(3 + 2 * NUM_CANDIDATES)
        self._start = stream_key(config.seed, 0)
        share, stretch = config.easy_share, config.easy_stretch
        self._to_hard = 1 / stretch if share < 1 else 0.0
        self._to_easy = self._to_hard * share / (1 - share) if share < 1 else 1.0

    def extend(self, context: tuple[int, bool] | None, token_id: int) -> tuple[int, bool]:
        """The context after one token more; None is the empty context. (hash, whether the next is easy)."""
        before = self._start if context is None else context[0]
        hashed = stream_key(before, token_id)
        uniform = (stream_key(hashed, _STREAM_STATE) >> 11) * 2.0**-53
        if context is None:
            return hashed, uniform < self._config.easy_share
        return hashed, uniform >= self._to_hard if context[1] else uniform < self._to_easy

    def logits(self, hashes: Tensor, is_easy: Tensor, *, has_error: bool, dtype: torch.dtype) -> Tensor:
        """Logits after each context.

        hashes: [R] int64, the bits of the hashes. is_easy: [R] bool. has_error: the draft's, not the
            target's.
        Returns [R, vocab] of `dtype`.
        """
        config, keys = self._config, hashes & _MASK63
        noise = gumbel_noise_for_seeds(keys, _STREAM_LOGITS, self._columns[: None if has_error else 3])
        # Gumbel noise is -log(-log u): undo it where u is wanted.
        uniforms = noise.neg().exp_().neg_().exp_()
        medians = self._median_betas[is_easy.to(torch.int64)]
        betas = medians * (config.spread * torch.special.ndtri(uniforms[:, 0])).exp_()
        values = -betas.clamp_(max=_MOST_BETA)[:, None] * self._log_ranks
        places = self._ranks
        if has_error:
            values += noise[:, 3 : 3 + NUM_CANDIDATES]
            is_unknown = uniforms[:, 3 + NUM_CANDIDATES :] < config.draft_blindness
            is_unknown[:, 0] = False
            places = places + NUM_CANDIDATES * is_unknown
        values.mul_(config.draft_error).clamp_(min=_LEAST)
        first = (uniforms[:, 1:2] * config.vocab_size).to(torch.int64)
        # Steps this short never come back to where they began, so the candidates differ.
        longest = (config.vocab_size - 1) // (2 * NUM_CANDIDATES)
        token_ids = (first + (1 + (uniforms[:, 2:3] * longest).to(torch.int64)) * places) % config.vocab_size
        logits = torch.full((len(hashes), config.vocab_size), _FLOOR, dtype=dtype)
        return logits.scatter_(1, token_ids, values.to(dtype))


def fit_beta(acceptance: float, *, spread: float) -> float:
    """The median of beta for which 1 / zeta(beta) comes to `acceptance` on average."""
    quantiles = [NormalDist().inv_cdf((index + 0.5) / 200) for index in range(200)]
    factors = torch.tensor([math.exp(spread * quantile) for quantile in quantiles], dtype=torch.float64)
    log_ranks = torch.arange(1, NUM_CANDIDATES + 1, dtype=torch.float64).log()
    low, high = 0.0, _MOST_BETA
    for _ in range(50):
        middle = (low + high) / 2
        betas = (middle * factors).clamp_(max=_MOST_BETA)
        reached = float((-betas[:, None] * log_ranks).exp_().sum(dim=1).reciprocal_().mean())
        low, high = (middle, high) if reached < acceptance else (low, middle)
    return high
