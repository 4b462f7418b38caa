"""The loss: KL from the target's law to the draft's, on the reduced vocabulary, fused with the head.

Of the target's law its likeliest tokens are known. Those that the head has rows for are renormalised and
mixed with the committed token. The gradient is formed on the way forward, where the soft-max is at hand: in
place of the logits, a few rows at a time, so that what is wide in float32 stays in the CPU's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SLICE_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLaw:
    """What is known of the target at N answer positions, in rows of the draft's head."""

    rows: Tensor
    """int64 [N, k + 1]; 0 where the head has no row (its weight is 0)."""
    weights: Tensor
    """float32 [N, k + 1]; a row sums to 1, or to 0 where nothing of the law is in the head."""
    best: Tensor
    """int64 [N]: head row of the target's likeliest token, -1 if there is none."""


def target_law(
    *, top_ids: Tensor, top_logprobs: Tensor, committed: Tensor, row_of_id: Tensor, token_weight: float
) -> TargetLaw:
    """top_ids, top_logprobs: [N, k]. committed: [N]. row_of_id: [V], -1 for ids without a row."""
    rows = torch.cat((row_of_id[top_ids.long()], row_of_id[committed.long()][:, None]), dim=1)
    law = top_logprobs.float().exp().masked_fill_(rows[:, :-1] < 0, 0.0)
    mass = law.sum(dim=1, keepdim=True)
    law = torch.where(mass > 0.05, law / mass.clamp(min=1e-9), 0.0)
    token = (rows[:, -1:] >= 0).float()
    weights = torch.cat((law * (1 - token_weight), token * token_weight), dim=1)
    total = weights.sum(dim=1, keepdim=True)
    return TargetLaw(
        rows=rows.clamp(min=0),
        weights=torch.where(total > 0, weights / total.clamp(min=1e-9), 0.0),
        best=rows[:, 0],
    )


@dataclass(slots=True)
class Agreement:
    """Filled on the way forward."""

    loss: float = 0.0
    """Mean KL over the positions that have a law."""
    num_right: int = 0
    """Positions where the draft's likeliest token is the target's."""
    num_positions: int = 0


class _LawLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, law: TargetLaw, agreement: Agreement) -> Tensor:  # type: ignore[no-untyped-def]
        num_known = law.weights.sum().clamp(min=1.0)
        weights = law.weights / num_known
        totals = weights.sum(dim=1, keepdim=True)
        logits = torch.mm(hidden, head.t())
        cross = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.shape[0], _SLICE_ROWS):
            part = slice(start, start + _SLICE_ROWS)
            rows, best = law.rows[part], law.best[part]
            log_probs = logits[part].float().log_softmax(dim=1)
            score_of_best = log_probs.gather(1, best.clamp(min=0)[:, None])[:, 0]
            agreement.num_right += int(((score_of_best >= log_probs.amax(dim=1)) & (best >= 0)).sum())
            cross -= (weights[part] * log_probs.gather(1, rows)).sum()
            grad = log_probs.exp_().mul_(totals[part])
            logits[part] = grad.scatter_add_(1, rows, -weights[part])
        loss = cross + (weights * law.weights.clamp(min=1e-9).log()).sum()
        grad_hidden, grad_head = torch.mm(logits, head), torch.mm(logits.t(), hidden)
        ctx.save_for_backward(grad_hidden, grad_head)
        agreement.loss = float(loss)
        agreement.num_positions += hidden.shape[0]
        return loss

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[no-untyped-def]
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0], grad_head * grads[0], None, None


def law_loss(hidden: Tensor, head: Tensor, law: TargetLaw) -> tuple[Tensor, Agreement]:
    """Mean loss over N positions. hidden: [N, hidden], normed. head: [R, hidden]."""
    agreement = Agreement()
    loss: Tensor = _LawLoss.apply(hidden, head, law, agreement)  # type: ignore[no-untyped-call]
    return loss, agreement
