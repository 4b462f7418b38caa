"""Filters against plain references written from their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.noise import gumbel_noise, gumbel_noise_for_seeds, hash_words, stream_key
from kernels.sampling import choose_coupled, sampling_law


def _reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """Probabilities by the book: sort, cut, renormalise; no ties in the data."""
    weights = [math.exp((z - max(logits)) / temperature) for z in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: top_k or None]
    total = sum(weights[i] for i in kept)
    mass, nucleus = 0.0, []
    for i in kept:
        if mass >= top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    nucleus = [i for i in nucleus if weights[i] >= min_p * max(weights)]
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize("vocab_size", [8, 700])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.1),
        (400, 0.8, 0.05),
        (1, 0.5, 0.5),
    ],
)
def test_law_equals_the_definition(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2
    law = sampling_law(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, expected in zip(law.softmax(-1), logits.tolist(), strict=True):
        reference = torch.tensor(_reference(expected, temperature, top_k, top_p, min_p), dtype=torch.float64)
        assert torch.allclose(row, reference, atol=1e-12)


def test_filters_keep_every_token_that_ties_with_the_last_one_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    law = sampling_law(logits, temperature=1.0, top_k=2)
    assert law.isfinite().tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_tiny_temperatures_are_greedy_and_finite_at_the_top(temperature: float) -> None:
    logits = torch.tensor([[3.0, 5.0, 4.999]])
    law = sampling_law(logits, temperature=temperature)
    assert not law.isnan().any()
    noise = gumbel_noise(1, 2, torch.arange(3)).float().unsqueeze(0)
    assert choose_coupled(law + noise).tolist() == [1]


def test_logits_are_not_changed() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sampling_law(logits, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)
    assert torch.equal(logits, before)


def test_ties_go_to_the_lowest_id_and_excluded_tokens_never_win() -> None:
    law = torch.tensor([[0.0, 1.0, 1.0], [-torch.inf, -torch.inf, -50.0]])
    assert choose_coupled(law).tolist() == [1, 2]
    noise = torch.tensor([[0.0, 0.0, 0.0], [30.0, 30.0, -3.0]])
    assert choose_coupled(law + noise).tolist() == [1, 2]


def test_noise_bits_are_what_they_were() -> None:
    """Pinned: a change of the hash would change every seeded answer that a user has kept."""
    assert stream_key(0, 0) == 5197578548964807871
    assert hash_words(42, 1000, torch.tensor([0, 49151])).tolist() == [
        8063957168139182872,
        2104744029381100961,
    ]


def test_scalar_and_vectorised_noise_are_the_same_numbers() -> None:
    ids = torch.tensor([0, 1, 77, 151_000])
    seeds = torch.tensor([0, 5, 2**63 - 1])
    rows = gumbel_noise_for_seeds(seeds, 123_456, ids)
    for seed, row in zip(seeds.tolist(), rows, strict=True):
        assert torch.equal(row, gumbel_noise(seed, 123_456, ids))


def test_noise_of_a_token_does_not_depend_on_the_ids_beside_it() -> None:
    full = gumbel_noise(3, 4, torch.arange(1000))
    some = torch.tensor([999, 0, 500])
    assert torch.equal(gumbel_noise(3, 4, some), full[some])


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_a_row_without_any_allowed_token_stays_one(options: dict[str, float]) -> None:
    """A draft's reduced head may have none of the tokens that a grammar allows. Other rows are as ever."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [-torch.inf] * 3], dtype=torch.float64)
    law = sampling_law(logits, temperature=0.7, **options)
    assert law[1].tolist() == [-torch.inf] * 3
    assert torch.equal(law[:1], sampling_law(logits[:1], temperature=0.7, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-29, 1e-40, 1e-46, 1e-320])
def test_however_cold_the_law_is_the_likeliest_token(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf], [5.0, -30.0, 5.0, 4.999]], dtype=dtype)
    law = sampling_law(logits, temperature=temperature, top_p=0.9, min_p=0.1)
    assert law.softmax(dim=-1).tolist() == [[0, 1, 0, 0], [0.5, 0, 0.5, 0]]
    assert not sampling_law(logits, temperature=temperature).to(torch.float32)[:, :3].isinf().any()
