"""The rejection rule: which proposed children the target accepts, and what it draws where it accepts none.

Source: speculative sampling (arXiv 2211.17192, 2302.01318), its extension to siblings drawn without
replacement (arXiv 2305.09781 and 2402.12374), and Saguaro sampling (arXiv 2603.03251). Everything here is a
pure function of probabilities and uniforms, over S independent rows at once: the engine asks with S = 1, a
test with many seeds.

A child is tried against the law that it was drawn from, and it must really have been drawn from that law. A
child that no chance had a hand in was drawn from a point mass. Whether a node gets one more child must be
decided before it is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row, by the inverse of the cumulated weights.

    weights: [S, V], not negative, each row with a positive sum; need not sum to 1. uniforms: [S] in (0, 1).
    Returns [S] int64; never a token of weight 0.
    """
    cumulated = weights.double().cumsum(dim=-1)
    total = cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, uniforms[:, None].double() * total, right=True)
    last = (cumulated < total).sum(dim=-1, keepdim=True)  # where the product is rounded up to the total
    return torch.minimum(tokens, last)[:, 0]


def without(weights: Tensor, tokens: Tensor) -> Tensor:
    """The weights [S, V] with those of one token a row, [S], set to 0."""
    return weights.scatter(-1, tokens[:, None], 0.0)


def draw_children(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens drawn one after the other without replacement.

    weights: [S, V]. uniforms: [S, M]; the first m of them decide the first m tokens, whatever follows.
    Returns [S, M] int64 in the order of drawing; -1 where the support was used up.
    """
    drawn = []
    for turn in uniforms.unbind(dim=-1):
        is_left = (weights > 0).any(dim=-1)
        tokens = draw(weights, turn)
        drawn.append(torch.where(is_left, tokens, -1))
        weights = without(weights, tokens)
    return torch.stack(drawn, dim=-1)


def laws_in_turn(draft_probs: Tensor, children: Tensor) -> list[Tensor]:
    """The law of each of several children drawn from one law without replacement.

    draft_probs: [S, V], weights. children: [S, M] in the order of drawing, each of positive weight. Returns M
    normalised [S, V]: the m-th lacks the children before it.
    """
    laws = []
    for tokens in children.unbind(dim=-1):
        laws.append(draft_probs / draft_probs.sum(dim=-1, keepdim=True))
        draft_probs = without(draft_probs, tokens)
    return laws


def residual(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """What the target's law [S, V] becomes once the tokens [S], drawn from draft_probs [S, V], were rejected.

    max(p - q, 0), normalised. Equal laws leave nothing, and then a rejection is a matter of rounding: what
    remains is p without the rejected token, or p itself where it had no other.
    """
    left = (target_probs - draft_probs).clamp_(min=0.0)
    for fallback in (without(target_probs, tokens), target_probs):
        is_empty = left.sum(dim=-1, keepdim=True) <= 0
        left = torch.where(is_empty, fallback, left)
    return left / left.sum(dim=-1, keepdim=True)


def choose_child(
    target_probs: Tensor, draft_laws: Sequence[Tensor], children: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Try the children of one node in turn.

    target_probs: [S, V], normalised. draft_laws: M of [S, V], normalised: what each child was drawn from,
    given those before it. children: [S, M]. uniforms: [S, M], fresh ones for each try.
    Returns the index of the accepted child [S] (-1: none), and [S, V]: where none was accepted, the law of
    the bonus token, elsewhere nothing of use. Accepts if u < p / q, strictly: p may be 0.
    """
    accepted = children.new_full((len(children),), -1)
    for index, draft_probs in enumerate(draft_laws):
        tokens = children[:, index]
        asked = uniforms[:, index] * draft_probs.gather(-1, tokens[:, None])[:, 0]
        takes = asked < target_probs.gather(-1, tokens[:, None])[:, 0]
        is_open = accepted < 0
        accepted = torch.where(is_open & takes, index, accepted)
        is_rejected = is_open & ~takes
        if not bool(is_rejected.any()):
            break
        rest = residual(target_probs, draft_probs, tokens)
        target_probs = torch.where(is_rejected[:, None], rest, target_probs)
    return accepted, target_probs


def point_mass(tokens: Tensor, vocab_size: int) -> Tensor:
    """The law [S, V] under which each row can only give its token [S]; float64."""
    return torch.nn.functional.one_hot(tokens, vocab_size).double()


def saguaro_law(law: Tensor, fan_outs: Sequence[int], c: float) -> Tensor:
    """Log weights from which the draft draws: those of the top F of each row times C.

    A smaller C leaves more of the target's law to the F tokens that the predictor prepares.

    law: [T, V] log weights, the draft's own, filters applied; -inf = excluded. fan_outs: F of each row, 0 and
    more. c: 0 to 1. A row whose whole support is in its top F stays as it is, as every C > 0 would leave it.
    """
    changed = law.clone()
    factor = math.log(c) if c > 0 else -math.inf
    for row, fan_out in enumerate(fan_outs):
        top = law[row].topk(min(fan_out, law.shape[-1])).indices
        changed[row, top] += factor
        if not bool((changed[row] > -math.inf).any()):
            changed[row] = law[row]
    return changed
