"""How the branch budget B is shared between the outcomes of one round.

Pure functions. `fan_outs` says how many bonus tokens to prepare after each node; `choose_outcomes` then
takes the likeliest ones and orders all outcomes by their estimated probability.
Source: arXiv 2603.03251, Theorem 12 (geometric fan-out).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import FanOut
from kernels.tree import node_depths

_LEAST_WEIGHT = 1e-30
_MIN_ACCEPTANCE = 0.02
_MAX_ACCEPTANCE = 0.98
"""Bounds on the acceptance estimate: at 1 the formula's last share is infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The root (index 0) and the nodes of a proposal, as far as the sharing goes."""

    depths: list[int]
    """0 for the root, k for a node reached after k accepted tokens."""
    is_leaf: list[bool]
    shares: list[float]
    """How the nodes of one depth share it; they sum to 1 at each depth."""

    @classmethod
    def chain(cls, depth: int) -> Nodes:
        """A chain of `depth` tokens."""
        levels = list(range(depth + 1))
        return cls(depths=levels, is_leaf=[level == depth for level in levels], shares=[1.0] * len(levels))

    @classmethod
    def tree(cls, parents: Sequence[int], reach: Sequence[float]) -> Nodes:
        """A tree: parents of its nodes, and log-probabilities that root and nodes are reached."""
        depths = [0, *node_depths(parents)]
        inner = {parent + 1 for parent in parents}
        totals: dict[int, float] = {}
        for depth, log_prob in zip(depths, reach, strict=True):
            totals[depth] = totals.get(depth, 0.0) + math.exp(log_prob)
        shares = [
            math.exp(log_prob) / totals[depth] if totals[depth] > 0 else 1.0 / depths.count(depth)
            for depth, log_prob in zip(depths, reach, strict=True)
        ]
        return cls(depths=depths, is_leaf=[row not in inner for row in range(len(depths))], shares=shares)


def reach_weights(nodes: Nodes, *, acceptance: float, power: float) -> list[float]:
    """Unnormalised geometric fan-out of the root and of every node.

    acceptance: a, the probability that one draft token is accepted; clamped inside (0, 1).
    power: r, the exponent with which the miss rate falls in the fan-out.
    Returns a^(k/(1+r)) times the node's share of its depth; a leaf below the root gets (1-a)^(-1/(1+r)) times
    as much, because no rejection is needed there. On a chain this is Theorem 12.
    """
    a = min(max(acceptance, _MIN_ACCEPTANCE), _MAX_ACCEPTANCE)
    return [
        share * a ** (k / (1 + power)) * ((1 - a) ** (-1 / (1 + power)) if is_leaf and k > 0 else 1.0)
        for k, is_leaf, share in zip(nodes.depths, nodes.is_leaf, nodes.shares, strict=True)
    ]


def round_to_budget(weights: Sequence[float], budget: int) -> list[int]:
    """Whole numbers proportional to `weights` that sum to `budget`, by largest remainder."""
    total = sum(weights)
    exact = [weight * budget / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: budget - sum(counts)]:
        counts[index] += 1
    return counts


def fan_outs(
    policy: FanOut,
    nodes: Nodes,
    *,
    budget: int,
    acceptance: float,
    power: float,
    is_filler: bool = False,
) -> list[int]:
    """Bonus tokens to prepare after the root and after every node; sums to `budget`.

    is_filler: no draft stands behind the proposal, so that hardly any of it will be accepted: everything
        goes to the root.
    """
    if is_filler:
        return [budget] + [0] * (len(nodes.depths) - 1)
    if policy is FanOut.uniform:
        return round_to_budget([1.0] * len(nodes.depths), budget)
    if policy is FanOut.geometric:
        return round_to_budget(reach_weights(nodes, acceptance=acceptance, power=power), budget)
    raise ValueError(f"fan_out={policy.value} is not a fixed-share policy")


def choose_outcomes(
    candidates: Sequence[Sequence[int]],
    counts: Sequence[int],
    nodes: Nodes,
    *,
    acceptance: float,
    power: float,
) -> list[tuple[int, int, float]]:
    """The outcomes to prepare, most probable first.

    candidates: for the root (index 0) and every node (index i + 1) its possible bonus tokens, best first,
        proposed children left out.
    counts: how many of them to take. Where a node has fewer, its share goes to the others, in turn.
    Returns (node, bonus token, log of an unnormalised probability), node -1 being the root.
    """
    counts = _fill_up(counts, [len(tokens) for tokens in candidates])
    ranked: list[tuple[float, int, int]] = []
    weights = _outcome_weights(nodes, acceptance)
    for row, (tokens, count) in enumerate(zip(candidates, counts, strict=True)):
        for rank, token in enumerate(tokens[:count]):
            # The power law: the r-th likeliest token is the bonus about rank^-(1 + r) as often as the first.
            ranked.append((weights[row] * (rank + 1.0) ** -(1 + power), row - 1, token))
    ranked.sort(key=lambda item: -item[0])
    return [(node, token, math.log(max(weight, _LEAST_WEIGHT))) for weight, node, token in ranked]


def _fill_up(counts: Sequence[int], available: Sequence[int]) -> list[int]:
    """Cut each count to what is available and hand the rest on, one at a time, to nodes with more to give."""
    filled = [min(count, have) for count, have in zip(counts, available, strict=True)]
    spare = min(sum(counts), sum(available)) - sum(filled)
    while spare > 0:
        for row, have in enumerate(available):
            if spare > 0 and filled[row] < have:
                filled[row] += 1
                spare -= 1
    return filled


def _outcome_weights(nodes: Nodes, acceptance: float) -> list[float]:
    """Probability that the target stops at each node, under i.i.d. acceptance of one child a level."""
    return [
        share * acceptance**k * (1.0 if is_leaf else 1 - acceptance)
        for k, is_leaf, share in zip(nodes.depths, nodes.is_leaf, nodes.shares, strict=True)
    ]
