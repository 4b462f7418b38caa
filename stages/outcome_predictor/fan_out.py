"""How the branch budget B is shared between the outcomes of one round.

Pure functions. `fan_outs` says how many bonus tokens to prepare after each node; `choose_outcomes` then
takes the likeliest ones and orders all outcomes by their estimated probability.
Source: arXiv 2603.03251, Theorem 12 (geometric fan-out).
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import FanOut

_MIN_ACCEPTANCE = 0.02
_MAX_ACCEPTANCE = 0.98
"""Bounds on the acceptance estimate: at 1 the formula's last share is infinite."""


def reach_weights(depths: Sequence[int], *, acceptance: float, power: float) -> list[float]:
    """Unnormalised geometric fan-out of the root and of every node of a chain.

    depths: 0 for the root, k for the node reached after k accepted tokens; one deepest node.
    acceptance: a, the probability that one draft token is accepted; clamped inside (0, 1).
    power: r, the exponent with which the miss rate falls in the fan-out.
    Returns a^(k/(1+r)), and a^(K/(1+r)) * (1-a)^(-1/(1+r)) for the deepest: no rejection is needed there.
    """
    a = min(max(acceptance, _MIN_ACCEPTANCE), _MAX_ACCEPTANCE)
    deepest = max(depths)
    return [
        a ** (k / (1 + power)) * ((1 - a) ** (-1 / (1 + power)) if k == deepest and k > 0 else 1.0)
        for k in depths
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
    policy: FanOut, depths: Sequence[int], *, budget: int, acceptance: float, power: float
) -> list[int]:
    """Bonus tokens to prepare after the root and after every node; sums to `budget`."""
    if policy is FanOut.uniform:
        return round_to_budget([1.0] * len(depths), budget)
    if policy is FanOut.geometric:
        return round_to_budget(reach_weights(depths, acceptance=acceptance, power=power), budget)
    raise ValueError(f"fan_out={policy.value} is not a fixed-share policy")


def choose_outcomes(
    candidates: Sequence[Sequence[int]],
    counts: Sequence[int],
    depths: Sequence[int],
    *,
    acceptance: float,
    power: float,
) -> list[tuple[int, int]]:
    """The outcomes to prepare, most probable first.

    candidates: for the root (index 0) and every node (index i + 1) its possible bonus tokens, best first,
        proposed children left out.
    counts: how many of them to take. Where a node has fewer, its share goes to the others, in turn.
    Returns (node, bonus token) pairs, node -1 being the root.
    """
    counts = _fill_up(counts, [len(tokens) for tokens in candidates])
    ranked: list[tuple[float, int, int]] = []
    weights = _outcome_weights(depths, acceptance)
    for row, (tokens, count) in enumerate(zip(candidates, counts, strict=True)):
        for rank, token in enumerate(tokens[:count]):
            # The power law: the r-th likeliest token is the bonus about rank^-(1 + r) as often as the first.
            ranked.append((-weights[row] * (rank + 1.0) ** -(1 + power), row - 1, token))
    ranked.sort(key=lambda item: item[0])
    return [(node, token) for _, node, token in ranked]


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


def _outcome_weights(depths: Sequence[int], acceptance: float) -> list[float]:
    """Probability that the target stops at each node of a chain, under i.i.d. acceptance."""
    deepest = max(depths)
    return [acceptance**k * (1.0 if k == deepest else 1 - acceptance) for k in depths]
