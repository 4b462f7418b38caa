"""The rejection rule keeps the target's law: chains, siblings, fillers, Saguaro sampling, many seeds at once.

The pure functions of a round run for 40,000 seeds over tables of 8 tokens: draws, judgement, bonus. The joint
law of the first three committed tokens is known exactly and compared by Pearson's chi-square; each comparison
has a false alarm of 1 in 10^7. Faults that engines shipped are planted, and must be noticed by the same
comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.noise import Stream, gumbel_noise_for_seeds, stream_seed, uniform, uniforms_for_seeds
from kernels.rejection import (
    choose_child,
    draw,
    draw_children,
    laws_in_turn,
    point_mass,
    residual,
    saguaro_law,
)
from kernels.sampling import sampling_law
from tests.statistics import fit_of_counts

VOCAB_SIZE = 8
NUM_SEEDS = 40_000
NUM_TOKENS = 3
FALSE_ALARM = 1e-7
START = 19
"""Position of the first token."""
SEEDS = {stream: torch.tensor([stream_seed(seed, stream) for seed in range(NUM_SEEDS)]) for stream in Stream}
PLAIN = {"temperature": 1.0}
OPTIONS = {
    "cold": {"temperature": 0.4},
    "filtered": {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
}


def _table(seed: int) -> Tensor:
    """Logits [V, V]: row = last token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How tokens are proposed and judged. The last five are right unless a fault is planted."""

    num_children: int = 1
    depth: int = 2
    c: float = 1.0
    fillers: bool = False
    """Propose the draft's likeliest tokens, with no chance involved."""
    acceptance: Stream = Stream.ACCEPTANCE
    bonus: Stream = Stream.BONUS
    judges_by_own_law: bool = False
    forgets_siblings: bool = False
    is_greedy_after_rejection: bool = False

    def tokens(self, target: Tensor, draft: Tensor) -> Tensor:
        """The first tokens of every seed, [S, NUM_TOKENS]. target, draft: log weights [V, V]."""
        drawn = saguaro_law(draft.log_softmax(dim=-1), [2] * VOCAB_SIZE, self.c).softmax(dim=-1)
        judged = draft.softmax(dim=-1) if self.judges_by_own_law else drawn
        last = torch.full((NUM_SEEDS,), 4)
        depths = torch.zeros(NUM_SEEDS, dtype=torch.int64)
        out = []
        for position in range(START, START + NUM_TOKENS):
            probs = target[last].softmax(dim=-1)
            children, laws = self._propose(drawn[last], judged[last], position)
            uniforms = self._uniforms(children, position)
            accepted, rest = choose_child(probs, laws, children, uniforms)
            # A proposal that was accepted to its end is followed by a token of the target's own.
            is_tried = depths < self.depth
            own = self._own_token(torch.where(is_tried[:, None], rest, probs), uniforms, position)
            takes = is_tried & (accepted >= 0)
            last = torch.where(takes, children.gather(1, accepted.clamp(min=0)[:, None])[:, 0], own)
            depths = torch.where(takes, depths + 1, 0)
            out.append(last)
        return torch.stack(out, dim=1)

    def _propose(self, drawn: Tensor, judged: Tensor, position: int) -> tuple[Tensor, list[Tensor]]:
        if self.fillers:
            children = drawn.topk(self.num_children, dim=-1).indices
            return children, [point_mass(tokens, VOCAB_SIZE) for tokens in children.unbind(dim=-1)]
        turns = uniforms_for_seeds(SEEDS[Stream.PROPOSAL], position, torch.arange(self.num_children))
        children = draw_children(drawn, turns)
        if self.forgets_siblings:
            return children, [judged] * self.num_children
        return children, laws_in_turn(judged, children)

    def _uniforms(self, children: Tensor, position: int) -> Tensor:
        if self.acceptance is Stream.PROPOSAL:
            return uniforms_for_seeds(SEEDS[Stream.PROPOSAL], position, torch.arange(self.num_children))
        noise = uniforms_for_seeds(SEEDS[Stream.ACCEPTANCE], position, torch.arange(VOCAB_SIZE))
        return noise.gather(1, children)

    def _own_token(self, rest: Tensor, uniforms: Tensor, position: int) -> Tensor:
        if self.is_greedy_after_rejection:
            return rest.argmax(dim=-1)
        if self.bonus is Stream.ACCEPTANCE:
            return draw(rest, uniforms[:, -1])
        noise = gumbel_noise_for_seeds(SEEDS[Stream.BONUS], position, torch.arange(VOCAB_SIZE))
        return (rest.log() + noise).argmax(dim=-1)


def _fit(rounds: Rounds, options: dict[str, float]) -> float:
    """p-value of the first tokens of all seeds under the exact law; the draft is often wrong."""
    target = sampling_law(_table(1), **options)
    tokens = rounds.tokens(target, sampling_law(1.2 * _table(2), **options))
    probs = target.softmax(dim=-1)
    joint = probs[4][:, None, None] * probs[:, :, None] * probs[None]
    cells = (tokens[:, 0] * VOCAB_SIZE + tokens[:, 1]) * VOCAB_SIZE + tokens[:, 2]
    return fit_of_counts(torch.bincount(cells, minlength=joint.numel()), joint.flatten())


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


ROUNDS = {
    "chain": Rounds(),
    "chain, C = 0.3": Rounds(c=0.3),
    "chain, C = 0": Rounds(c=0.0),
    "two siblings, C = 0.3": Rounds(num_children=2, c=0.3),
    "two siblings, one level": Rounds(num_children=2, depth=1),
    "filler": Rounds(fillers=True),
    "three fillers": Rounds(fillers=True, num_children=3),
}


@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS.keys())
def test_the_first_tokens_follow_the_targets_law(rounds: Rounds) -> None:
    assert _fit(rounds, PLAIN) > FALSE_ALARM


@pytest.mark.parametrize("rounds", [Rounds(num_children=2, c=0.3), Rounds(c=0.0)], ids=["siblings", "chain"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_temperatures_and_filters_are_part_of_both_laws(rounds: Rounds, options: dict[str, float]) -> None:
    assert _fit(rounds, options) > FALSE_ALARM


@pytest.mark.parametrize("c", [0.0, 0.3, 1.0])
def test_many_siblings_keep_the_law(c: float) -> None:
    assert _fit(Rounds(num_children=4, c=c), PLAIN) > FALSE_ALARM


def test_an_equal_draft_is_always_accepted_and_leaves_no_nan() -> None:
    """p == q: nothing is left of the law after a rejection that only rounding can bring about."""
    probs = sampling_law(_table(1), temperature=1e-3).softmax(dim=-1)
    rows = probs[torch.arange(NUM_SEEDS) % VOCAB_SIZE]
    children = draw_children(rows, uniforms_for_seeds(SEEDS[Stream.PROPOSAL], START, torch.arange(1)))
    uniforms = uniforms_for_seeds(SEEDS[Stream.ACCEPTANCE], START, torch.arange(1))
    accepted, rest = choose_child(rows, laws_in_turn(rows, children), children, uniforms)
    assert bool((accepted == 0).all())
    left = residual(rows, rows, children[:, 0])
    assert bool(left.isfinite().all())
    torch.testing.assert_close(left.sum(dim=-1), torch.ones(NUM_SEEDS, dtype=torch.float64))
    assert bool(rest.isfinite().all())


FAULTS = {
    "proposal and acceptance share noise": Rounds(acceptance=Stream.PROPOSAL),
    "acceptance and bonus share noise": Rounds(bonus=Stream.ACCEPTANCE),
    "judged by the law before Saguaro sampling": Rounds(c=0.3, judges_by_own_law=True),
    "a tried sibling stays in the draft's law": Rounds(num_children=2, forgets_siblings=True),
    "greedy after a rejection": Rounds(is_greedy_after_rejection=True),
}


@pytest.mark.parametrize("rounds", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_noticed(rounds: Rounds) -> None:
    assert _fit(rounds, PLAIN) < FALSE_ALARM


def test_a_token_without_probability_is_refused_even_by_the_smallest_noise() -> None:
    """Strictly less: 0 < 0 is false, where `<=` would accept what the target excludes."""
    probs = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    draft = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    accepted, rest = choose_child(probs, [draft], torch.tensor([[0]]), torch.zeros(1, 1, dtype=torch.float64))
    assert accepted.tolist() == [-1]
    assert rest.tolist() == [[0.0, 1.0]]


def test_the_bonus_token_is_never_a_rejected_child() -> None:
    """2,000 random laws, three children each, all rejected: no weight is left on any of them."""
    generator = torch.Generator().manual_seed(5)
    target, draft = torch.rand(2, 2000, VOCAB_SIZE, generator=generator, dtype=torch.float64).unbind()
    target = target / target.sum(dim=-1, keepdim=True)
    children = draw_children(draft, torch.rand(2000, 3, generator=generator, dtype=torch.float64))
    almost_one = torch.full((2000, 3), 1 - 2.0**-53, dtype=torch.float64)
    accepted, rest = choose_child(target, laws_in_turn(draft, children), children, almost_one)
    rejected = accepted < 0
    assert rejected.sum() > 100
    assert float(rest.gather(1, children)[rejected].max()) == 0.0


def test_children_end_where_the_support_ends() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
    children = draw_children(weights, torch.tensor([[0.2, 0.9, 0.5]]))
    assert children.tolist() == [[1, 3, -1]]


def test_a_draw_is_never_a_token_of_weight_zero() -> None:
    """At both ends of the uniforms."""
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.4, 0.0]], dtype=torch.float64).expand(2, -1)
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, ends).tolist() == [1, 3]


def test_saguaro_sampling_weakens_the_likeliest_and_keeps_a_law() -> None:
    law = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]], dtype=torch.float64).log()
    changed = saguaro_law(law, [1, 2], 0.5).softmax(dim=-1)
    torch.testing.assert_close(changed[0], torch.tensor([0.25, 0.3, 0.2], dtype=torch.float64) / 0.75)
    # The second row's whole support is in its top 2, where every C gives the same law, 0 in the limit.
    for c in (0.5, 0.0):
        torch.testing.assert_close(saguaro_law(law, [1, 2], c)[1].softmax(dim=-1), law[1].exp())
    assert saguaro_law(law, [1, 1], 0.0)[0].softmax(dim=-1)[0] == 0.0
    torch.testing.assert_close(saguaro_law(law, [0, 0], 0.0), law)


def test_one_uniform_is_the_number_that_many_seeds_get() -> None:
    many = uniforms_for_seeds(torch.tensor([7, 2**62 + 3]), 31, torch.tensor([0, 5]))
    expected = [[uniform(seed, 31, token) for token in (0, 5)] for seed in (7, 2**62 + 3)]
    assert many.tolist() == expected
