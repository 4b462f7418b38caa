"""What the rejection rule needs beside a proposal's tokens: the laws that they were drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from conf.proposal_size import nodes_of_widths
from conf.schema import DType, RunConfig
from pipeline.messages import DraftLaws
from pipeline.stage import PoolExporter
from pipeline.tensor_pool import PoolSpec
from stages.draft_speculator.draft_source import DraftSource
from stages.draft_speculator.draft_tree import DraftTree, NextTokens
from stages.draft_speculator.drawn_tokens import DrawnTokens

_SLOTS_PER_REQUEST = 4
"""The target reads a proposal's laws when it arrives, so the next one of its request is never too soon."""


class LawWriter:
    """Owns the pools in which the laws travel. A law has a column for each row of the draft's head."""

    def __init__(
        self, pools: PoolExporter, *, token_ids: Sequence[int], max_laws: int, num_slots: int, dtype: str
    ) -> None:
        """token_ids: of the columns. max_laws: of one proposal. dtype: of the laws."""
        ids = np.array(token_ids, dtype=np.int32)
        spec = PoolSpec(name="draft_law_token_ids", num_slots=1, shape=ids.shape, dtype="int32")
        self._token_ids = pools.export(spec).write(ids)
        self._pool = pools.export(
            PoolSpec(name="draft_laws", num_slots=num_slots, shape=(max_laws, len(ids)), dtype=dtype)
        )

    @classmethod
    def of(cls, config: RunConfig, source: DraftSource, pools: PoolExporter) -> LawWriter | None:
        """None where nothing is drawn by chance."""
        if source.law_token_ids is None:
            return None
        widths = config.speculation.tree.widths or [1] * config.speculation.depth
        return cls(
            pools,
            token_ids=source.law_token_ids,
            max_laws=1 + nodes_of_widths(widths[:-1]),
            num_slots=_SLOTS_PER_REQUEST * config.max_requests,
            dtype="float64" if config.model.dtype is DType.float64 else "float32",
        )

    def write(self, tree: DraftTree, is_drafted: Sequence[bool]) -> DraftLaws | None:
        """The laws of the submitted proposal; None where none of its tokens was drawn.

        is_drafted: of each of its nodes; the others were looked up, or filled in.
        """
        row_of: dict[int, int] = {}
        laws: list[DrawnTokens] = []
        rows: list[int] = []
        for node, is_drafts_own in zip(tree.proposal, is_drafted, strict=True):
            parent = tree.parents[node]
            following = tree.next_tokens[parent]
            if not is_drafts_own or not isinstance(following, DrawnTokens):
                rows.append(-1)
                continue
            if parent not in row_of:
                row_of[parent] = len(laws)
                laws.append(following)
            rows.append(row_of[parent])
        if not laws:
            return None
        weights = torch.stack([law.weights for law in laws]).cpu().numpy()
        return DraftLaws(rows=rows, weights=self._pool.write(weights), token_ids=self._token_ids)


def candidates_of(following: NextTokens | None, count: int) -> list[tuple[int, float]]:
    """The likeliest next tokens, whether children are drawn or ranked."""
    if following is None:
        return []
    return following.candidates(count) if isinstance(following, DrawnTokens) else following.ranked(count)


def fan_outs_below(
    tree: DraftTree, nodes: Iterable[int], *, anchors: Iterable[int], by_depth: Sequence[int]
) -> list[int]:
    """F of each node, from its depth below the root or the branch that it continues.

    by_depth: F at each depth of a proposal; empty: none is known, and so is the result.
    """
    if not by_depth:
        return []
    tops = set(anchors)
    fan_outs = []
    for node in nodes:
        depth, top = 0, node
        while top > tree.root and top not in tops:
            depth, top = depth + 1, tree.parents[top]
        fan_outs.append(by_depth[min(depth, len(by_depth) - 1)])
    return fan_outs
