"""Tests of sampled laws: how probable is a deviation this large, if the law is right?"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_EXPECTED = 10.0
"""Cells with fewer expected draws are counted as one: below it a chi-square is not one."""


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with so many degrees of freedom >= statistic)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fit_of_counts(counts: Tensor, probs: Tensor) -> float:
    """Pearson's test of independent draws against a law. counts, probs: [cells]. Returns the p-value."""
    expected = probs.double() * counts.sum()
    is_rare = expected < _LEAST_EXPECTED
    observed = torch.cat([counts[~is_rare].double(), counts[is_rare].double().sum()[None]])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    # A cell that cannot occur must not.
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return chi_square_tail(statistic, len(expected) - 1)


def fit_of_conditional_draws(draws: Tensor, probs: Tensor) -> float:
    """Test draws of which each has a law of its own, given all before it.

    draws: [N] class of each draw. probs: [N, C] its law over the classes, known before the draw. The sum of
    (indicator - probability) is a martingale, so it is normal in the limit with the summed covariance.
    Returns the p-value of its quadratic form. Classes may be renamed from draw to draw.
    """
    excess = torch.nn.functional.one_hot(draws, probs.shape[-1]).double().sub(probs).sum(dim=0)
    covariance = torch.diag(probs.sum(dim=0)) - probs.T @ probs
    # Rows of a law sum to 1, so one class says nothing new; classes that hardly occur say nothing yet.
    values, vectors = torch.linalg.eigh(covariance)
    is_used = values > _LEAST_EXPECTED / 4
    scores = (vectors.T @ excess)[is_used] / values[is_used].sqrt()
    return chi_square_tail(float((scores**2).sum()), int(is_used.sum()))
