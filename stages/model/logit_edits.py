"""What a request's options do to logits before temperature: bans, biases, and penalties for repetition.

The law of a row depends on the tokens before it. In a tree these are the committed tokens and the path from
the root to the row's node, so every row has a context of its own: committed tokens are counted once, as they
come, and what a path adds is worked out for the few tokens on it. Only columns that an option touches are
computed, and a value does not depend on whether its tokens are committed or on the path: a token verified in
a tree has the law that plain decoding gives it, to the last bit.

Order and meaning as in vLLM: bans until `min_tokens`, bias, repetition, frequency, presence.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from pipeline.messages import Sampling

Path = Sequence[int]
"""Tokens from the one after the last committed token to the row's node; empty for the root."""


def has_edits(sampling: Sampling) -> bool:
    """Whether any of these options is in use."""
    return bool(sampling.logit_bias) or sampling.min_tokens > 0 or _has_penalties(sampling)


def _has_penalties(sampling: Sampling) -> bool:
    additive = sampling.presence_penalty, sampling.frequency_penalty
    return sampling.repetition_penalty != 1.0 or any(additive)


class LogitEdits:
    """The edits of one request, and what they need to know of its committed tokens."""

    def __init__(
        self,
        sampling: Sampling,
        vocab_ids: Tensor,
        *,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Collection[int],
    ) -> None:
        """vocab_ids: [V] int64 ascending, the token id of each column; others cannot be chosen.

        eos_token_ids: banned until `min_tokens`, as the request's own stop tokens are.
        """
        self._sampling = sampling
        self._vocab_ids = vocab_ids
        self._has_penalties = _has_penalties(sampling)
        self._num_output = 0
        self._banned = self._columns_of(sorted({*eos_token_ids, *sampling.stop_token_ids}))
        size = len(vocab_ids)
        self._bias = torch.zeros(size, dtype=torch.float64)
        self._is_seen = torch.zeros(size, dtype=torch.bool)
        """Columns of tokens that prompt or output hold."""
        self._counts = torch.zeros(size, dtype=torch.float64)
        """How often the output holds each."""
        biased = self._columns_of(sorted(sampling.logit_bias))
        self._bias[biased] = torch.tensor(
            [sampling.logit_bias[token] for token in vocab_ids[biased].tolist()], dtype=torch.float64
        )
        self._touched = biased
        """Columns that the committed tokens or the bias change, each once."""
        self._is_touched = torch.zeros(size, dtype=torch.bool)
        self._is_touched[biased] = True
        if sampling.repetition_penalty != 1.0:
            columns = self._columns_of(prompt_token_ids)
            self._is_seen[columns] = True
            self._touch(columns)

    def commit(self, token_ids: Sequence[int]) -> None:
        """More output tokens."""
        self._num_output += len(token_ids)
        if not self._has_penalties:
            return
        columns = self._columns_of(token_ids)
        self._is_seen[columns] = True
        self._counts.index_add_(0, columns, torch.ones(len(columns), dtype=torch.float64))
        self._touch(columns)

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Logits with all edits.

        logits: [T, V] float32 or float64; not changed. paths: of each row. Returns [T, V], -inf where banned.
        """
        edited = logits.clone()
        touched = self._touched
        if len(touched):
            edited[:, touched] = self._edit(logits[:, touched], touched, self._counts[touched])
        if self._has_penalties:
            self._edit_path_tokens(logits, edited, paths)
        if self._sampling.min_tokens > self._num_output:
            for row, path in enumerate(paths):
                if self._num_output + len(path) < self._sampling.min_tokens:
                    edited[row, self._banned] = -torch.inf
        return edited

    def _edit_path_tokens(self, logits: Tensor, edited: Tensor, paths: Sequence[Path]) -> None:
        """Write the values of the tokens on each row's path, with the path counted."""
        on_path = [Counter(path) for path in paths]
        token_ids = list(itertools.chain.from_iterable(on_path))
        if not token_ids:
            return
        rows = torch.tensor([row for row, counts in enumerate(on_path) for _ in counts])
        added = torch.tensor([n for counts in on_path for n in counts.values()], dtype=torch.float64)
        columns, is_known = self._find_columns(token_ids)
        rows, columns, added = rows[is_known], columns[is_known], added[is_known]
        counts = self._counts[columns] + added
        edited[rows, columns] = self._edit(logits[rows, columns], columns, counts, is_seen=True)

    def _edit(self, values: Tensor, columns: Tensor, counts: Tensor, *, is_seen: bool = False) -> Tensor:
        """Bias and penalties, element by element.

        values: [..., C], of these columns. counts: [C] float64, how often the output holds each.
        is_seen: every one stands before its row; else what the committed tokens say.
        """
        sampling, dtype = self._sampling, values.dtype
        values = values + self._bias[columns].to(dtype)
        if sampling.repetition_penalty != 1.0:
            penalty = sampling.repetition_penalty
            penalised = torch.where(values < 0, values * penalty, values / penalty)
            values = penalised if is_seen else torch.where(self._is_seen[columns], penalised, values)
        if sampling.frequency_penalty:
            values = values - (sampling.frequency_penalty * counts).to(dtype)
        if sampling.presence_penalty:
            values = values - sampling.presence_penalty * (counts > 0).to(dtype)
        return values

    def _touch(self, columns: Tensor) -> None:
        new = torch.unique(columns[~self._is_touched[columns]])
        if len(new):
            self._is_touched[new] = True
            self._touched = torch.cat([self._touched, new])

    def _columns_of(self, token_ids: Sequence[int]) -> Tensor:
        """Columns of those tokens that have one."""
        columns, is_known = self._find_columns(token_ids)
        return columns[is_known]

    def _find_columns(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The column of each token, and whether it has one. Both [N]."""
        wanted = torch.tensor(token_ids, dtype=torch.int64)
        columns = torch.searchsorted(self._vocab_ids, wanted).clamp_(max=len(self._vocab_ids) - 1)
        return columns, self._vocab_ids[columns] == wanted
