"""The law a token is drawn from: logits after temperature, top-k, top-p and min-p, in log space.

Order as in transformers: temperature, then top-k, then top-p (of what top-k kept), then min-p. Filters
keep every token that ties with the last one kept, so that the law does not depend on how a sort breaks
ties. Rows are independent: a row's law does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-30
"""What is colder is taken as this, which has the same law: a float32 may overflow when it is divided by less,
and what float32 takes for 0 makes NaN of it."""
_FIRST_CANDIDATES = 256
"""How many of the likeliest tokens top-p looks at before it sorts the whole vocabulary."""


def sampling_law(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Unnormalised log-probabilities of the law that tokens are drawn from.

    logits: [T, V] float32 or float64, as the model gave them, or -inf for excluded tokens; not changed. A row
    of nothing else stays one.
    Returns [T, V] of the same dtype; the likeliest token of a row is 0, excluded tokens are -inf. At
    temperature 0 only the order matters, so the logits themselves are returned.
    """
    if temperature == 0.0:
        return logits
    # Subtract the maximum first: at tiny temperatures the quotient then goes to -inf, never to NaN.
    largest = logits.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    law = (logits - largest).div_(max(temperature, MIN_TEMPERATURE))
    vocab_size = law.shape[-1]
    if 0 < top_k < vocab_size:
        kth = law.topk(top_k, dim=-1).values[:, -1:]
        law.masked_fill_(law < kth, -torch.inf)
    if top_p < 1.0:
        law.masked_fill_(law < _top_p_threshold(law, top_p), -torch.inf)
    if min_p > 0.0:
        # The likeliest token has log weight 0, so the rule p < min_p * p_max reads:
        law.masked_fill_(law.exp() < min_p, -torch.inf)
    return law


def _top_p_threshold(law: Tensor, top_p: float) -> Tensor:
    """Log weight of the last token that top-p keeps, [T, 1].

    The smallest set of likeliest tokens with mass >= top_p: a token stays if the mass before it is less
    than top_p. Usually a few hundred tokens hold that mass, and no full sort is needed.
    """
    log_total = law.logsumexp(dim=-1, keepdim=True)
    count = min(_FIRST_CANDIDATES, law.shape[-1])
    while True:
        values = law.topk(count, dim=-1).values
        mass = (values - log_total).exp().cumsum(dim=-1)
        if count == law.shape[-1] or bool((mass[:, -1] >= top_p).all()):
            break
        count = law.shape[-1]
    num_kept = (mass < top_p).sum(dim=-1, keepdim=True).add_(1).clamp_(max=count)
    return values.gather(-1, num_kept - 1)


def choose_coupled(perturbed: Tensor) -> Tensor:
    """Sample one token per row (Gumbel-max identity): the target's choice, and the draft's best child.

    perturbed: [T, V], `sampling_law` plus `gumbel_noise`; for greedy rows the logits alone. -inf plus noise
        stays -inf, because noise is finite: an excluded token never wins.
    Returns token ids [T] int64. Ties go to the lowest id, so every stage breaks them alike.
    """
    return perturbed.argmax(dim=-1)
