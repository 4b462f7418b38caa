"""Log-probabilities of committed tokens by the model's own law, whatever law they were chosen from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.messages import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], *, num_top: int) -> list[TokenLogprobs]:
    """One entry for each row and its token.

    logits: [T, V], as the model gave them. token_ids: [T], the tokens that were chosen.
    num_top: likeliest tokens to report; fewer where the vocabulary is smaller.
    """
    law = logits.log_softmax(dim=-1)
    chosen = law.gather(-1, torch.tensor(token_ids, device=law.device)[:, None])
    ranks = (law >= chosen).sum(dim=-1).tolist()
    top = law.topk(min(num_top, law.shape[-1]), dim=-1)
    columns = zip(
        token_ids, chosen[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True
    )
    return [
        TokenLogprobs(token_id=token, logprob=logprob, rank=rank, top_token_ids=ids, top_logprobs=values)
        for token, logprob, rank, ids, values in columns
    ]
