"""Training batches: whole sequences of similar length, padded on the right to a multiple of 16."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.distill.law_loss import TargetLaw, target_law
from tools.distill.shards import Answer

_WINDOW = 4096
"""Answers sorted by length at a time: enough for little padding, few enough for mixed batches."""
_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step."""

    token_ids: Tensor
    """int64 [B, S]."""
    rows: Tensor
    """int64 [N]: flattened positions whose next token is an answer's."""
    law: TargetLaw
    """Of the N positions."""


def epoch(answers: Sequence[Answer], *, batch_tokens: int, seed: str) -> Iterator[list[Answer]]:
    """All answers once, in batches of about `batch_tokens` positions, in an order that the seed gives."""
    draw = random.Random(seed)
    order = list(answers)
    draw.shuffle(order)
    groups: list[list[Answer]] = []
    for start in range(0, len(order), _WINDOW):
        window = sorted(order[start : start + _WINDOW], key=length_of)
        group: list[Answer] = []
        for answer in window:
            if group and (len(group) + 1) * padded(length_of(answer)) > batch_tokens:
                groups.append(group)
                group = []
            group.append(answer)
        groups.append(group)
    draw.shuffle(groups)
    yield from groups


def length_of(answer: Answer) -> int:
    """Positions that are read: the last token of the answer is only predicted."""
    return len(answer.prompt_ids) + len(answer.answer_ids) - 1


def padded(length: int) -> int:
    """Up to the next multiple."""
    return -(-length // _MULTIPLE) * _MULTIPLE


def collate(answers: Sequence[Answer], *, row_of_id: Tensor, token_weight: float) -> Batch:
    """Put answers side by side."""
    longest = padded(max(map(length_of, answers)))
    token_ids = torch.zeros(len(answers), longest, dtype=torch.int64)
    rows = []
    for index, answer in enumerate(answers):
        ids = torch.cat((answer.prompt_ids, answer.answer_ids[:-1]))
        token_ids[index, : len(ids)] = ids
        first = index * longest + len(answer.prompt_ids) - 1
        rows.append(torch.arange(first, first + len(answer.answer_ids)))
    law = target_law(
        top_ids=torch.cat([answer.top_ids for answer in answers]),
        top_logprobs=torch.cat([answer.top_logprobs for answer in answers]),
        committed=torch.cat([answer.answer_ids for answer in answers]),
        row_of_id=row_of_id,
        token_weight=token_weight,
    )
    return Batch(token_ids=token_ids, rows=torch.cat(rows), law=law)


def row_map(head_token_ids: Tensor, vocab_size: int) -> Tensor:
    """int64 [V]: the head's row of each id, -1 where it has none."""
    rows = torch.full((vocab_size,), -1, dtype=torch.int64)
    rows[head_token_ids] = torch.arange(len(head_token_ids))
    return rows
