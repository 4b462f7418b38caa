"""Applies a structured output's grammar to rows of logits: each row by the path to its node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.grammar import GrammarState, Mask
from stages.model.logit_edits import Path


class GrammarMask:
    """The grammar of one request over the columns of one head."""

    def __init__(self, state: GrammarState, vocab_ids: Tensor) -> None:
        """vocab_ids: [V] int64 ascending, the token id of each column."""
        self.state = state
        self._vocab_ids = vocab_ids

    def apply(self, edited: Tensor, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Exclude what the grammar does not allow.

        edited: [T, V], after bans, bias and penalties. logits: [T, V], before them. paths: of each row.
        Returns [T, V]. Where a ban leaves nothing of what is allowed, the grammar wins: the row is that of
        `logits`. A row is empty only where a reduced head has no allowed token at all, and a row whose path
        is not allowed stays as it is: its node cannot be reached.
        """
        is_allowed = torch.ones(edited.shape, dtype=torch.bool)
        for row, path in enumerate(paths):
            mask = self.state.mask(path)
            if mask is not None:
                is_allowed[row] = self._columns(mask)
        is_allowed = is_allowed.to(edited.device)
        masked = edited.masked_fill(~is_allowed, -torch.inf)
        is_empty = ~(masked > -torch.inf).any(dim=-1, keepdim=True)
        if not bool(is_empty.any()):
            return masked
        return torch.where(is_empty, logits.masked_fill(~is_allowed, -torch.inf), masked)

    def _columns(self, mask: Mask) -> Tensor:
        """The mask [ids] as one of the columns [V]; ids beyond it are rows of padding."""
        by_id = torch.from_numpy(mask)
        is_known = self._vocab_ids < len(mask)
        columns = torch.zeros(len(self._vocab_ids), dtype=torch.bool)
        columns[is_known] = by_id[self._vocab_ids[is_known]]
        return columns
