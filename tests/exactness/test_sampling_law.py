"""Coupled sampling is an exact sample of the target's law: after hits, misses and every kind of backup.

200,000 seeds go through the pure functions of a round: noise, law, choice, acceptance. The vocabulary has
8 tokens and the laws are tables over the last token, so the truth is known.

Bound: for N draws over V outcomes, P(total variation > e) <= 2^V exp(-2 N e^2) (Bretagnolle and Huber;
Weissman et al. 2003). The bounds below are set for a false alarm in 10^9 per comparison.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.noise import gumbel_noise_for_seeds
from kernels.sampling import choose_coupled, sampling_law
from kernels.tree import accept_path

VOCAB_SIZE = 8
NUM_SEEDS = 200_000
FAN_OUT = 2
FALSE_ALARM = 1e-9
OPTIONS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.4},
    "filtered": {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
}


def _bound(num_draws: int) -> float:
    return math.sqrt((VOCAB_SIZE * math.log(2) - math.log(FALSE_ALARM)) / (2 * num_draws))


def _table(seed: int) -> Tensor:
    """Logits [V, V]: row = last token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator, dtype=torch.float64)


def _check(tokens: Tensor, law: Tensor) -> None:
    """tokens: draws [N]; law: log weights [V] they should follow."""
    assert len(tokens) > 1000, "too few draws in this group to say anything"
    observed = torch.bincount(tokens, minlength=VOCAB_SIZE) / len(tokens)
    distance = 0.5 * (observed - law.softmax(-1)).abs().sum().item()
    assert distance < _bound(len(tokens)), f"total variation {distance:.4f} with {len(tokens)} draws"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_tokens_after_hit_miss_and_backup_follow_the_targets_law(options: dict[str, float]) -> None:
    target, draft = _table(1), 0.7 * _table(1) + 0.6 * _table(2)
    seeds = torch.arange(NUM_SEEDS) * 7919 + 3
    ids = torch.arange(VOCAB_SIZE)
    noise = [gumbel_noise_for_seeds(seeds, position, ids) for position in range(20, 25)]
    target_law, draft_law = sampling_law(target, **options), sampling_law(draft, **options)
    rows = torch.arange(NUM_SEEDS)

    # Round 1: root token 4 at position 19, a chain of two, and the outcomes prepared for it.
    root = torch.full((NUM_SEEDS,), 4)
    chain = [root]
    for step in range(2):
        chain.append(choose_coupled(draft_law[chain[-1]] + noise[step]))
    choices = [choose_coupled(target_law[token] + noise[k]) for k, token in enumerate(chain)]
    prepared = []
    for k, token in enumerate(chain):
        perturbed = draft_law[token] + noise[k]
        if k < 2:
            perturbed[rows, chain[k + 1]] = -torch.inf  # the proposed child cannot be the bonus there
        prepared.append(perturbed.topk(FAN_OUT).indices)
    walked = [
        accept_path(choice, proposed, [-1, 0])
        for choice, proposed in zip(
            torch.stack(choices, dim=1).tolist(), torch.stack(chain[1:], dim=1).tolist(), strict=True
        )
    ]
    num_accepted = torch.tensor([len(accepted) for accepted, _ in walked])
    bonus = torch.tensor([token for _, token in walked])
    is_hit = (torch.stack(prepared, dim=1)[rows, num_accepted] == bonus.unsqueeze(1)).any(dim=1)

    # The first token of round 1, and the bonus, are draws of the target's law.
    _check(choices[0], target_law[4])
    for last in range(VOCAB_SIZE):
        after = (num_accepted == 2) & (chain[2] == last)
        if after.sum() > 5000:
            _check(bonus[after], target_law[last])

    # Round 2: one token, proposed from the cache, by the draft, by a look-up, or by nobody.
    next_noise = torch.stack(noise, dim=1)[rows, num_accepted + 1]
    truth = choose_coupled(target_law[bonus] + next_noise)
    drafted = choose_coupled(draft_law[bonus] + next_noise)
    looked_up = (bonus + 1) % VOCAB_SIZE
    for proposed, group in (
        (drafted, is_hit),
        (drafted, ~is_hit),
        (looked_up, ~is_hit),
        (torch.full_like(bonus, -1), ~is_hit),
    ):
        committed = torch.tensor(
            [
                (proposal if accept_path([choice, 0], [proposal], [-1])[0] else choice)
                for choice, proposal in zip(truth.tolist(), proposed.tolist(), strict=True)
            ]
        )
        assert group.sum() > 5000
        for last in range(VOCAB_SIZE):
            members = group & (bonus == last)
            if members.sum() > 2000:
                _check(committed[members], target_law[last])


def test_the_bound_notices_noise_that_proposes_and_accepts() -> None:
    """The fault that an engine shipped: the rejection rule with the noise of the coupled one.

    A token that won the draw has a large g, so its uniform exp(-exp(-g)) is not one for acceptance any more.
    """
    target = sampling_law(_table(1), temperature=1.0)[4]
    draft = sampling_law(_table(2), temperature=1.0)[4]
    probs, draft_probs = target.softmax(-1), draft.softmax(-1)
    ids = torch.arange(VOCAB_SIZE)
    noise, bonus_noise = (gumbel_noise_for_seeds(torch.arange(NUM_SEEDS), p, ids) for p in (20, 21))
    proposed = choose_coupled(draft.expand(NUM_SEEDS, -1) + noise)
    bonus = choose_coupled((probs - draft_probs).clamp(min=0).log() + bonus_noise)
    ratio = (probs / draft_probs)[proposed]
    fresh = torch.rand(NUM_SEEDS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _check(torch.where(fresh < ratio, proposed, bonus), target)
    shared = torch.exp(-torch.exp(-noise.gather(1, proposed[:, None])[:, 0]))
    with pytest.raises(AssertionError, match="total variation"):
        _check(torch.where(shared < ratio, proposed, bonus), target)


def test_positions_seeds_and_tokens_draw_independent_noise() -> None:
    """Correlations between neighbouring streams, 200,000 pairs each: |r| < 0.015 is a 6.7 sigma bound."""
    ids = torch.arange(VOCAB_SIZE)
    seeds = torch.arange(NUM_SEEDS)
    here, there = (gumbel_noise_for_seeds(seeds, position, ids) for position in (7, 8))
    pairs = {
        "positions": (here[:, 0], there[:, 0]),
        "tokens": (here[:, 0], here[:, 1]),
        "seeds": (here[:-1, 0], here[1:, 0]),
        "diagonal": (here[:-1, 1], there[1:, 0]),
    }
    for name, pair in pairs.items():
        correlation = torch.corrcoef(torch.stack(pair))[0, 1].item()
        assert abs(correlation) < 0.015, name


def test_noise_is_standard_gumbel() -> None:
    """Kolmogorov-Smirnov distance of 1.6 million draws; 0.0027 has a false alarm below 10^-9."""
    noise = gumbel_noise_for_seeds(torch.arange(NUM_SEEDS), 3, torch.arange(VOCAB_SIZE)).flatten()
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    grid = torch.arange(1, len(uniform) + 1) / len(uniform)
    assert (uniform - grid).abs().max() < 0.0027
    assert noise.isfinite().all()
