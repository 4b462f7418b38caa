"""A draft model: one distilled from the target, another of its vocabulary, or its own first layers.

Proposals and scores are named by the target's ids, whatever rows the draft's head has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import choose_coupled
from pipeline.messages import BeginDraft
from stages.draft_speculator.draft_source import DraftSource, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree, Rerooting
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.pages import KVHandle
from stages.model.runner import ModelRunner
from stages.model.token_law import TokenLaw


class LogitsRow:
    """`NextTokens` over one row of perturbed logits. The top is sorted out only when it is asked for."""

    __slots__ = ("_best", "_row", "_token_ids")

    def __init__(self, row: Tensor, best: int, token_ids: list[int] | None) -> None:
        """row: [V] perturbed logits; best: their arg-max; token_ids: of the columns, None if they are ids."""
        self._row = row
        self._best = best
        self._token_ids = token_ids

    def best(self) -> int | None:
        """The likeliest token under the shared noise."""
        return self._best if self._token_ids is None else self._token_ids[self._best]

    def top(self, count: int) -> tuple[list[int], list[float]]:
        """Best first, excluded tokens left out; scores are log q + g up to the row's own constant."""
        values, columns = self._row.topk(min(count, self._row.shape[-1]))
        num_allowed = int((values > -torch.inf).sum())
        ids: list[int] = columns[:num_allowed].tolist()
        if self._token_ids is not None:
            ids = [self._token_ids[column] for column in ids]
        return ids, values[:num_allowed].tolist()


@dataclass(slots=True)
class _DraftRequest:
    kv: KVHandle
    law: TokenLaw


class ModelDraft(DraftSource):
    """Reads nodes with one packed forward over all requests."""

    def __init__(self, runner: ModelRunner, *, vocab_size: int, head_token_ids: Tensor | None = None) -> None:
        """vocab_size: ids below it may be proposed; a padded head may have rows that the target lacks.

        head_token_ids: [R] ascending, the target's id of each row of a reduced head; None: row i is id i.
        """
        self._runner = runner
        self._vocab_ids = torch.arange(vocab_size) if head_token_ids is None else head_token_ids
        self._token_ids: list[int] | None = None if head_token_ids is None else head_token_ids.tolist()
        self._requests: dict[str, _DraftRequest] = {}
        self.max_position = runner.shape.max_position

    def begin(self, request: BeginDraft, *, max_nodes: int) -> None:
        """Allocate the request's KV."""
        num_slots = min(request.max_len, self._runner.shape.max_position) + max_nodes
        self._requests[request.request_id] = _DraftRequest(
            kv=self._runner.kv.allocate(num_slots), law=TokenLaw(request.sampling, self._vocab_ids)
        )

    def extend(self, jobs: Sequence[ExtendJob]) -> None:
        """One forward; logits only from the roots on."""
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        sequences: list[SequenceRows] = []
        for job in jobs:
            tree = job.tree
            logit_rows += [len(token_ids) + i for i, node in enumerate(job.nodes) if node >= tree.root]
            token_ids += [tree.token_ids[node] for node in job.nodes]
            positions += [tree.position(node) for node in job.nodes]
            sequences.append(_sequence_rows(tree, job.nodes, self._requests[job.request_id].kv))
        logits = self._runner.forward(
            ForwardBatch(token_ids=token_ids, positions=positions, sequences=sequences, logit_rows=logit_rows)
        )
        logits = logits[:, : len(self._vocab_ids)]
        row = 0
        for job in jobs:
            tree = job.tree
            wanted = [node for node in job.nodes if node >= tree.root]
            law = self._requests[job.request_id].law
            perturbed = law.perturb(
                logits[row : row + len(wanted)], [tree.position(node) + 1 for node in wanted]
            )
            bests = choose_coupled(perturbed).tolist()  # the one synchronisation of a step
            for node, best, scores in zip(wanted, bests, perturbed, strict=True):
                tree.next_tokens[node] = LogitsRow(scores, best, self._token_ids)
            for node in job.nodes:
                tree.is_read[node] = True
            row += len(wanted)

    def reroot(self, request_id: str, rerooting: Rerooting, tree: DraftTree) -> None:
        """Move the KV of what stays behind the committed tokens."""
        request = self._requests[request_id]
        if rerooting.moved_from:
            self._runner.kv.move(request.kv, rerooting.moved_from, rerooting.moved_to)
        request.law.forget_before(tree.committed_len)

    def end(self, request_id: str) -> None:
        """Free the request's pages."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._runner.kv.free(request.kv)


def _sequence_rows(tree: DraftTree, nodes: list[int], kv: KVHandle) -> SequenceRows:
    """Slots and mask for reading `nodes`. A chain at the end of the tree needs no mask."""
    prefix_len = tree.prefix_len
    tail_len = nodes[-1] + 1
    is_chain = nodes[0] + len(nodes) == tail_len and all(
        tree.parents[node] == node - 1 for node in range(1, tail_len)
    )
    mask: Tensor | None = None
    if not is_chain:
        mask = torch.zeros(len(nodes), tail_len, dtype=torch.bool)
        for row, node in enumerate(nodes):
            mask[row, : min(node, tree.root) + 1] = True
            mask[row, tree.ancestors(node)] = True
    return SequenceRows(
        kv=kv,
        prefix_len=prefix_len,
        write_slots=[prefix_len + node for node in nodes],
        tail_len=tail_len,
        mask=mask,
    )
