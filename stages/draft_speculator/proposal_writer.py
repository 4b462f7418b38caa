"""Makes the message of a proposal: what was drafted, what was looked up beside it, and the laws of both."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Sequence
from itertools import accumulate

from conf.schema import Backup
from pipeline.messages import Proposal, ProposalSource
from stages.draft_speculator.draft_laws import LawWriter
from stages.draft_speculator.draft_request import DraftRequest, Submitted
from stages.draft_speculator.fillers import hang, random_tokens
from stages.draft_speculator.growth import Entry, Shape, settle
from stages.draft_speculator.ngram_draft import LookedUp
from stages.draft_speculator.planner import Planner


class ProposalWriter:
    """Holds no state of a request: that is in its `DraftRequest`."""

    def __init__(
        self,
        shape: Shape,
        planner: Planner,
        laws: LawWriter | None,
        *,
        backup: Backup,
        num_look_up: int,
    ) -> None:
        """laws: where tokens are drawn by chance. num_look_up: tokens looked up beside the draft's."""
        self._backup = backup
        self._num_look_up = num_look_up
        self._shape = shape
        self._planner = planner
        self._laws = laws

    def submit(self, request: DraftRequest, entries: Sequence[Entry], *, useful: int) -> Proposal:
        """The proposal of a selection, with what was looked up beside it or, after a miss, in its place.

        useful: most levels. The request's tree takes note of what was submitted.
        """
        tree = request.tree
        nodes = settle(tree, tree.root, entries)
        submitted = [Submitted(entry.log_prob) for entry in entries]
        promised = sum(math.exp(entry.log_value) for entry in entries)
        is_filler = not nodes and request.source is ProposalSource.BACKUP
        most = self._shape.num_nodes if is_filler else self._num_look_up
        if request.text is not None and useful > 0 and most > 0:
            chain = self.look_up(request, min(useful, self._shape.depth))
            added = hang(tree, nodes, [token.token_id for token in chain], most=most)
            base = tree.depth(added[0]) - 1 if added else 0
            submitted += [Submitted(None, token.matched) for token in chain[base : base + len(added)]]
            promised += sum(self._chances(chain)[base : base + len(added)])
            nodes += added
        tree.submit(nodes)
        request.submitted, request.promised = submitted, promised
        is_drafted = [node.log_prob is not None for node in submitted]
        laws = None if self._laws is None else self._laws.write(tree, is_drafted)
        request.is_drawn = laws is not None
        draft_spans, request.spans = request.spans, []
        request.submitted_ns = time.monotonic_ns()
        return Proposal(
            request_id=request.request_id,
            round_id=request.round_id,
            committed_len=tree.committed_len,
            token_ids=[tree.token_ids[node] for node in tree.proposal],
            parents=tree.proposal_parents(),
            source=request.source,
            ready_length=request.ready_length,
            rest_rounds=request.rest_left if request.is_resting else None,
            rest_batch=request.rest_batch if request.is_resting else 0,
            plan=self._planner.figures(),
            draft_spans=draft_spans,
            laws=laws,
        )

    def _chances(self, chain: Sequence[LookedUp]) -> list[float]:
        """That each token of a looked-up chain is accepted; random ones count for nothing."""
        look_up = self._planner.measures.look_up
        each = [look_up[token.matched].value if token.matched else 0.0 for token in chain]
        return list(accumulate(each, operator.mul))

    def look_up(self, request: DraftRequest, count: int) -> list[LookedUp]:
        """Up to `count` tokens to follow the root that cost no draft step."""
        assert request.text is not None, "only asked for where the text is kept"
        if self._backup is Backup.random:
            text, position = request.text.token_ids, request.tree.committed_len
            tokens = random_tokens(text, seed=request.seed, position=position, count=count)
            return [LookedUp(token, 0) for token in tokens]
        return self._planner.keep_looked_up(request.text.chain(count))
