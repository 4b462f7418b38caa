"""Children drawn by chance, for the rejection rule: from which law, with which noise.

The noise of a draw is keyed by the request's seed and by *all* the tokens before it, not by the position
alone. Which contexts are read, and how soon, depends on tokens that were drawn for other contexts at the same
position (branches compete for the draft's time, and for the budget); with noise of their own they tell
nothing about each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.noise import Stream, extend_key, stream_seed, uniform
from kernels.rejection import draw_children, saguaro_law
from stages.draft_speculator.draft_tree import DraftTree


class DrawnTokens:
    """`NextTokens` in the order in which they were drawn, without replacement. Drawn when asked for."""

    __slots__ = ("_drawn", "_key", "_log_law", "_seed", "_token_ids", "weights")

    def __init__(
        self, weights: Tensor, log_law: Tensor, *, seed: int, key: int, token_ids: Sequence[int] | None
    ) -> None:
        """weights: [V], what is drawn from. log_law: [V], the draft's own law before Saguaro sampling.

        seed, key: of the noise. token_ids: of the columns, None if they are ids.
        """
        self.weights = weights
        self._log_law = log_law
        self._seed = seed
        self._key = key
        self._token_ids = token_ids
        self._drawn: list[tuple[int, float]] = []

    def ranked(self, count: int) -> list[tuple[int, float]]:
        """The first `count` draws, with their log-probabilities as first ones; fewer if none is left."""
        if count > len(self._drawn):
            uniforms = [uniform(self._seed, self._key, turn) for turn in range(count)]
            columns = draw_children(self.weights[None], torch.tensor([uniforms], dtype=torch.float64))[0]
            columns = columns[columns >= 0]
            probs = self.weights[columns].tolist()
            self._drawn = [
                (self._id(column), math.log(prob))
                for column, prob in zip(columns.tolist(), probs, strict=True)
            ]
        return self._drawn[:count]

    def candidates(self, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens of the draft's own law, best first, with their log-probabilities."""
        values, columns = self._log_law.topk(min(count, len(self._log_law)))
        return [
            (self._id(column), value)
            for column, value in zip(columns.tolist(), values.tolist(), strict=True)
            if value > -math.inf
        ]

    def _id(self, column: int) -> int:
        return column if self._token_ids is None else self._token_ids[column]


class Drawer:
    """Makes `DrawnTokens` for one request."""

    def __init__(self, seed: int, *, saguaro_c: float | None, token_ids: Sequence[int] | None) -> None:
        """seed: the request's. saguaro_c: C, None for the draft's own law. token_ids: see `DrawnTokens`."""
        self._seed = stream_seed(seed, Stream.PROPOSAL)
        self._saguaro_c = saguaro_c
        self._token_ids = token_ids
        self._num_committed = 0
        self._committed_key = 0

    def start(self, token_ids: Sequence[int]) -> None:
        """The committed tokens that the request begins with."""
        for token in token_ids:
            self._committed_key = extend_key(self._committed_key, token)
        self._num_committed = len(token_ids)

    def note_committed(self, tree: DraftTree) -> None:
        """Take newly committed tokens into the key. Call before the tree forgets them."""
        for token in tree.token_ids[self._num_committed - tree.prefix_len : tree.root + 1]:
            self._committed_key = extend_key(self._committed_key, token)
        self._num_committed = tree.committed_len

    def next_tokens(
        self, tree: DraftTree, nodes: Sequence[int], law: Tensor, fan_outs: Sequence[int]
    ) -> list[DrawnTokens]:
        """What may follow the nodes. law: [nodes, V] log weights. fan_outs: F of each node, or nothing."""
        self.note_committed(tree)
        # A row without any allowed token in the draft's head has no law: nothing is drawn from it.
        log_law = law.log_softmax(dim=-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if self._saguaro_c is not None and fan_outs:
            weights = saguaro_law(log_law, fan_outs, self._saguaro_c).softmax(dim=-1)
        else:
            weights = log_law.exp()
        return [
            DrawnTokens(
                weights[row],
                log_law[row],
                seed=self._seed,
                key=self._key(tree, node),
                token_ids=self._token_ids,
            )
            for row, node in enumerate(nodes)
        ]

    def _key(self, tree: DraftTree, node: int) -> int:
        key = self._committed_key
        for token in tree.path(node):
            key = extend_key(key, token)
        return key
