"""A draft model: one distilled from the target, another of its vocabulary, or its own first layers.

Proposals and scores are named by the target's ids, whatever rows the draft's head has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.sampling import choose_coupled
from pipeline.errors import EngineDead
from pipeline.messages import BeginDraft
from stages.draft_speculator.draft_source import DraftSource, Drawing, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree, Rerooting
from stages.draft_speculator.drawn_tokens import Drawer
from stages.grammar import GrammarCompiler, begin_grammar
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.pages import KVHandle
from stages.model.runner import Runner
from stages.model.token_law import TokenLaw


class LogitsRow:
    """`NextTokens` over one row of perturbed logits. More than the few best are sorted out when asked for."""

    __slots__ = ("_few", "_log_total", "_ranked", "_row", "_rows", "_token_ids")

    def __init__(
        self,
        rows: Tensor,
        row: int,
        few: list[tuple[int, float]],
        log_total: float,
        token_ids: list[int] | None,
    ) -> None:
        """rows: [R, V] perturbed logits. row: which of them this is; few are looked at again.

        few: its best columns with their values. log_total: its log-sum-exp. token_ids: of the columns, None
        if they are ids.
        """
        self._rows = rows
        self._row = row
        self._few = few
        self._ranked: list[tuple[int, float]] | None = None
        self._log_total = log_total
        self._token_ids = token_ids

    def ranked(self, count: int) -> list[tuple[int, float]]:
        """Best first, excluded tokens left out."""
        if count > len(self._few):
            values, columns = self._rows[self._row].topk(min(count, self._rows.shape[-1]))
            return self._named(list(zip(columns.tolist(), values.tolist(), strict=True)))
        if self._ranked is None:
            self._ranked = self._named(self._few)
        return self._ranked[:count]

    def _named(self, columns: list[tuple[int, float]]) -> list[tuple[int, float]]:
        ids = self._token_ids
        return [
            (column if ids is None else ids[column], value - self._log_total)
            for column, value in columns
            if value > -math.inf
        ]


@dataclass(slots=True)
class _DraftRequest:
    kv: KVHandle
    max_nodes: int
    token_ids: list[int]
    """Committed tokens."""
    num_read: int
    """Of these, from the first."""
    num_to_keep: int
    """Of so many the pages are made known to later requests as they are read; 0 when that is done."""
    law: TokenLaw
    drawer: Drawer | None
    """Given where children are drawn by chance."""


class ModelDraft(DraftSource):
    """Reads nodes with one packed forward over all requests."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        head_token_ids: Tensor | None = None,
        num_ranked: int = 1,
        drawing: Drawing = Drawing.COUPLED,
        saguaro_c: float | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """vocab_size: ids below it may be proposed; a padded head may have rows that the target lacks.

        num_ranked: tokens of each row that are sure to be asked for.
        saguaro_c: C of Saguaro sampling, where tokens are drawn.
        head_token_ids: [R] ascending, the target's id of each row of a reduced head; None: row i is id i.
        grammars: of the target's vocabulary; None: structured outputs are drafted as any text is.
        """
        self._runner = runner
        self._vocab_ids = torch.arange(vocab_size) if head_token_ids is None else head_token_ids
        self._token_ids: list[int] | None = None if head_token_ids is None else head_token_ids.tolist()
        self._num_ranked = num_ranked
        self._drawing = drawing
        self._saguaro_c = saguaro_c
        self._grammars = grammars
        if drawing is Drawing.DRAWN:
            self.law_token_ids = self._vocab_ids.tolist()
        self._requests: dict[str, _DraftRequest] = {}
        self.max_position = runner.shape.max_position
        self.num_pages = runner.kv.num_pages
        self.page_size = runner.kv.page_size

    def begin(self, request: BeginDraft, *, max_nodes: int) -> int:
        """Allocate KV for the tokens that the request begins with and its tree. Raises `RequestError`."""
        grammar = begin_grammar(self._grammars, request.sampling, eos_token_ids=request.eos_token_ids)
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        longest = self._runner.shape.max_position
        kv = self._runner.kv.allocate(
            min(len(token_ids), longest) + max_nodes,
            max_slots=min(request.max_len, longest) + max_nodes,
            token_ids=token_ids[:longest],
        )
        law = TokenLaw(
            request.sampling,
            self._vocab_ids,
            prompt_token_ids=request.prompt_token_ids,
            eos_token_ids=request.eos_token_ids,
            grammar=grammar,
        )
        law.commit(request.output_token_ids)
        drawer: Drawer | None = None
        if self._drawing is Drawing.DRAWN and request.sampling.temperature > 0:
            drawer = Drawer(request.sampling.seed, saguaro_c=self._saguaro_c, token_ids=self._token_ids)
            drawer.start(token_ids)
        self._requests[request.request_id] = _DraftRequest(
            kv=kv,
            max_nodes=max_nodes,
            token_ids=token_ids,
            num_read=kv.num_cached,
            num_to_keep=len(token_ids),
            law=law,
            drawer=drawer,
        )
        return kv.num_cached

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
            positions += [tree.positions[node] for node in job.nodes]
            sequences.append(_sequence_rows(tree, job.nodes, self._requests[job.request_id].kv))
        logits = self._runner.forward(
            ForwardBatch(token_ids=token_ids, positions=positions, sequences=sequences, logit_rows=logit_rows)
        )
        self._rank(jobs, logits[:, : len(self._vocab_ids)])
        for job in jobs:
            for node in job.nodes:
                job.tree.is_read[node] = True
            self._note_read(self._requests[job.request_id], job.tree)

    def _note_read(self, request: _DraftRequest, tree: DraftTree) -> None:
        request.num_read = tree.num_read_committed
        if request.num_to_keep > 0:
            num_kept = min(request.num_to_keep, request.num_read)
            self._runner.kv.keep(request.kv, request.token_ids[:num_kept])
            if num_kept == request.num_to_keep:
                request.num_to_keep = 0

    def _rank(self, jobs: Sequence[ExtendJob], logits: Tensor) -> None:
        """Set what may follow the nodes from the roots on. logits: [those nodes of all jobs, V]."""
        ranked: list[tuple[DraftTree, int]] = []
        scored: list[Tensor] = []
        is_changed = False
        row = 0
        for job in jobs:
            nodes = [node for node in job.nodes if node >= job.tree.root]
            if not nodes:
                continue
            rows = logits[row : row + len(nodes)]
            row += len(nodes)
            if self._requests[job.request_id].drawer is not None:
                self._draw(job, nodes, rows)
                is_changed = True
            else:
                ranked += [(job.tree, node) for node in nodes]
                scored.append(self._score(job, nodes, rows))
                is_changed |= scored[-1] is not rows
        if not ranked:
            return
        together = torch.cat(scored) if is_changed else logits
        values, columns = _best(together, self._num_ranked)
        totals = together.logsumexp(dim=-1).tolist()  # synchronises, where there is a GPU
        for row, ((tree, node), *few, total) in enumerate(
            zip(ranked, columns.tolist(), values.tolist(), totals, strict=True)
        ):
            few_best = list(zip(*few, strict=True))
            tree.next_tokens[node] = LogitsRow(together, row, few_best, total, self._token_ids)

    def _draw(self, job: ExtendJob, nodes: list[int], logits: Tensor) -> None:
        """Draw what may follow the nodes. logits: [nodes, V]."""
        request, tree = self._requests[job.request_id], job.tree
        assert request.drawer is not None, "only asked for where children are drawn"
        fan_outs = job.fan_outs[len(job.nodes) - len(nodes) :]
        law = request.law.log_law(logits, self._paths(job, nodes))
        for node, tokens in zip(nodes, request.drawer.next_tokens(tree, nodes, law, fan_outs), strict=True):
            tree.next_tokens[node] = tokens

    def _score(self, job: ExtendJob, nodes: list[int], logits: Tensor) -> Tensor:
        """What the tokens after the nodes are ranked by, [nodes, V]. logits: the same shape."""
        law, paths = self._requests[job.request_id].law, self._paths(job, nodes)
        if self._drawing is Drawing.COUPLED:
            return law.perturb(logits, [job.tree.positions[node] + 1 for node in nodes], paths)
        return law.log_law(logits, paths)

    def _paths(self, job: ExtendJob, nodes: list[int]) -> list[list[int]]:
        """The tokens below the root down to each node, where the request's law asks for them."""
        reads_paths = self._requests[job.request_id].law.reads_paths
        return [job.tree.path(node) for node in nodes] if reads_paths else []

    def reroot(self, request_id: str, rerooting: Rerooting, tree: DraftTree) -> None:
        """Move the KV of what stays behind the committed tokens."""
        request = self._requests[request_id]
        if request.drawer is not None:
            request.drawer.note_committed(tree)
        if rerooting.moved_from:
            self._runner.kv.move(request.kv, rerooting.moved_from, rerooting.moved_to)
        num_new = tree.committed_len - request.law.num_committed
        new = tree.token_ids[tree.root + 1 - num_new : tree.root + 1]
        request.law.commit(new)
        request.law.forget_before(tree.committed_len)
        request.token_ids += new
        self._note_read(request, tree)
        num_slots = min(tree.committed_len, self._runner.shape.max_position) + request.max_nodes
        if not self._runner.kv.grow(request.kv, num_slots):
            raise EngineDead(
                f"the draft's KV cache has no page left for request {request_id} at {num_slots} slots: "
                "the verifier counts its pages, and should have pre-empted a request before"
            )

    def end(self, request_id: str) -> None:
        """Free the request's pages; full ones stay known."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._runner.kv.free(request.kv, request.token_ids[: request.num_read])


def _best(perturbed: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and columns of the best `count` of each row; ties as the target's arg-max breaks them."""
    if count > 1:
        return perturbed.topk(min(count, perturbed.shape[-1]), dim=-1)
    columns = choose_coupled(perturbed)[:, None]
    return perturbed.gather(-1, columns), columns


def _sequence_rows(tree: DraftTree, nodes: list[int], kv: KVHandle) -> SequenceRows:
    """Slots and mask for reading `nodes`. A chain at the end of the tree needs no mask."""
    prefix_len = tree.prefix_len
    tail_len = nodes[-1] + 1
    is_chain = nodes[0] + len(nodes) == tail_len and all(
        tree.parents[node] == node - 1 for node in range(1, tail_len)
    )
    mask: Tensor | None = None
    if not is_chain:
        visible = np.zeros((len(nodes), tail_len), dtype=bool)
        visible[:, : tree.root + 1] = True
        rows, columns = list[int](), list[int]()
        for row, node in enumerate(nodes):
            if node <= tree.root:
                visible[row, node + 1 :] = False
            else:
                path = tree.ancestors(node)
                rows += [row] * len(path)
                columns += path
        visible[rows, columns] = True
        mask = torch.from_numpy(visible)
    return SequenceRows(
        kv=kv,
        prefix_len=prefix_len,
        write_slots=[prefix_len + node for node in nodes],
        tail_len=tail_len,
        mask=mask,
    )
