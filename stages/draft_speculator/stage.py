"""The draft-speculator: guesses tokens, and owns the speculation cache.

After an `Outcome` it answers with the next `Proposal`: from the cache on a hit, drafted now on a miss, and
always drafted in linear speculation. With `prepare_outcomes` it then goes on while the target verifies:
it reads what it proposed (the glue step), sends the predictor the likeliest tokens after every node, and
drafts a continuation for each outcome of the returned plan, one level a slice. `Stage.work` is called
only while the inbox is empty, so an outcome interrupts the drafting between two steps, and what is ready
is served.
"""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np

from conf.schema import Backup, RunConfig
from pipeline.errors import EngineDead, ProtocolError, RequestError
from pipeline.log import get_logger
from pipeline.messages import (
    BeginDraft,
    Candidates,
    EndDraft,
    Outcome,
    Plan,
    Proposal,
    ProposalSource,
    SpeculatorMessage,
    StageName,
)
from pipeline.stage import Stage, StageContext
from pipeline.tensor_pool import PoolSpec
from stages.draft_speculator.draft_request import DraftRequest, Phase
from stages.draft_speculator.draft_source import DraftSource, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.growth import Anchor, Shape, grow, select, settle
from stages.draft_speculator.load_source import load_source
from stages.draft_speculator.ngram_draft import NgramIndex

_log = get_logger(__name__)

_SLOTS_PER_REQUEST = 4
"""Candidate tensors a request may have under way: the predictor is at most a round behind."""


class DraftSpeculator(Stage):
    """See the module docstring. Tests pass a source; a process makes it from the configuration."""

    accepts = SpeculatorMessage

    def __init__(self, config: RunConfig, context: StageContext, source: DraftSource | None = None) -> None:
        speculation = config.speculation
        self._config = config
        self._context = context
        self._outbox = context.outbox
        self._source_given = source
        self._has_cache = speculation.prepare_outcomes
        self._shape = Shape.of(speculation)
        self._has_fillers = self._has_cache and speculation.backup is Backup.ngram
        prob = speculation.min_path_prob
        self._min_log_prob = math.log(prob) if prob > 0 else -math.inf
        self._budget = speculation.budget if self._has_cache else 0
        self._requests: dict[str, DraftRequest] = {}

    # --- life ----------------------------------------------------------------------------------------

    @property
    def _max_nodes(self) -> int:
        """Nodes behind the committed tokens: the proposal, the branches with their proposals, a bonus token
        after a miss, what best first reads and then leaves out, and room to settle one more proposal."""
        shape = self._shape
        left_out = 0 if shape.widths else shape.rows * shape.depth
        return 2 * shape.num_nodes + self._budget * (shape.num_nodes + 1) + 1 + left_out

    def setup(self) -> None:
        """Load the draft and export the pools for the predictor's candidates."""
        self._source = self._source_given or load_source(
            self._config, max_nodes=self._max_nodes, num_ranked=self._shape.most_children
        )
        if self._has_cache:
            num_slots = _SLOTS_PER_REQUEST * self._config.max_requests
            shape = (self._shape.num_nodes + 1, self._num_candidates)
            self._id_pool = self._context.pools.export(
                PoolSpec(name="candidate_ids", num_slots=num_slots, shape=shape, dtype="int32")
            )
            self._log_prob_pool = self._context.pools.export(
                PoolSpec(name="candidate_log_probs", num_slots=num_slots, shape=shape, dtype="float32")
            )

    @property
    def _num_candidates(self) -> int:
        """Tokens that the predictor is told of after each node: it may want as many beside the children."""
        return self._budget + self._shape.most_children

    def close(self) -> None:
        """Forget every request."""
        self._requests.clear()

    # --- messages --------------------------------------------------------------------------------------

    def handle(self, message: SpeculatorMessage) -> None:
        """Begin, take an outcome or a plan, or end."""
        match message:
            case BeginDraft():
                self._begin(message)
            case EndDraft():
                if self._requests.pop(message.request_id, None) is not None:
                    self._source.end(message.request_id)
            case Outcome():
                self._take_outcome(message)
            case Plan():
                self._take_plan(message)

    def _begin(self, message: BeginDraft) -> None:
        can_draft = True
        try:
            self._source.begin(message, max_nodes=self._max_nodes)
        except RequestError as error:
            can_draft = False
            _log.warning("request %s goes on without a draft: %s", message.request_id, error)
        request = DraftRequest(
            request_id=message.request_id,
            tree=DraftTree(message.prompt_token_ids),
            max_len=message.max_len,
            can_draft=can_draft,
            phase=Phase.IDLE,
        )
        if self._has_fillers:
            request.lookup = NgramIndex()
            request.lookup.append(message.prompt_token_ids)
        self._requests[message.request_id] = request
        num_prompt, limit = len(message.prompt_token_ids), self._source.max_position
        if self._useful_depth(request, num_prompt + 1) > 0:
            # The prefill is round 0 with an empty proposal: its outcome can be prepared like any other.
            request.phase = Phase.GLUING if self._has_cache else Phase.READING
        elif limit is not None and num_prompt >= limit:
            _log.warning(
                "request %s goes on without a draft: its prompt has %d tokens, the draft reads at most %d",
                message.request_id,
                num_prompt,
                limit,
            )

    def _take_outcome(self, outcome: Outcome) -> None:
        request = self._requests.get(outcome.request_id)
        if request is None or outcome.round_id < request.round_id:
            self.num_late_messages += 1
            return
        tree = request.tree
        _check_outcome(outcome, request)
        if request.lookup is not None:
            path = reversed(tree.ancestors(tree.proposal_node(outcome.accepted_node)))
            request.lookup.append([*(tree.token_ids[node] for node in path), outcome.bonus_token])
        rerooting = tree.reroot(outcome.accepted_node, outcome.bonus_token)
        if request.can_draft:
            self._source.reroot(request.request_id, rerooting, tree)
        tree.drop_read_prefix()
        request.round_id += 1
        request.branches = []
        request.pending = []
        useful = self._useful_depth(request, tree.committed_len)
        ready = select(tree, tree.root, self._shape, depth=self._shape.depth) if self._has_cache else []
        request.ready_length = len(ready)
        if ready:
            request.source = ProposalSource.HIT
            if useful < self._shape.depth:
                ready = select(tree, tree.root, self._shape, depth=useful)
            self._submit(request, settle(tree, tree.root, ready))
        elif request.lookup is not None:
            request.source = ProposalSource.BACKUP
            self._submit(request, self._filler(tree, request.lookup.chain(useful)))
        else:
            request.source = ProposalSource.BACKUP if self._has_cache else ProposalSource.DRAFT
            request.phase = Phase.DRAFTING
            request.steps_left = self._shape.depth
            self._draft(request)

    def _take_plan(self, plan: Plan) -> None:
        request = self._requests.get(plan.request_id)
        if request is None or request.round_id != plan.round_id or request.phase is not Phase.PLANNING:
            self.num_late_messages += 1
            return
        tree = request.tree
        _check_plan(plan, request)
        for accepted_index, bonus_token, log_prob in zip(
            plan.nodes, plan.token_ids, plan.log_probs, strict=True
        ):
            depth_of_node = tree.depth(tree.proposal_node(accepted_index))
            useful = self._useful_depth(request, tree.committed_len + depth_of_node + 1)
            if useful == 0 or len(request.branches) == self._budget or self._room(tree) <= 0:
                continue
            node = tree.add_branch(accepted_index, bonus_token)
            if node is not None and all(node != branch.node for branch in request.branches):
                request.branches.append(Anchor(node, useful, log_prob))
        request.phase = Phase.BRANCHING
        self._grow_branches(request)

    # --- work ------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """One draft step: for the requests that the target waits for, else for one kind of preparation."""
        for phase in (Phase.DRAFTING, Phase.READING, Phase.GLUING, Phase.BRANCHING):
            requests = [request for request in self._requests.values() if request.phase is phase]
            if requests:
                self._step(phase, requests)
                return True
        return False

    def _step(self, phase: Phase, requests: list[DraftRequest]) -> None:
        jobs = [
            ExtendJob(request_id=r.request_id, tree=r.tree, nodes=nodes)
            for r in requests
            if (nodes := self._nodes_to_read(r))
        ]
        if jobs:
            start_ns = time.monotonic_ns()
            self._source.extend(jobs)
            span = (start_ns, time.monotonic_ns())
            for job in jobs:
                self._requests[job.request_id].spans.append(span)
                # Shifts tree indices only where committed tokens were unread, and then no chain and no
                # branch exists yet that could hold one.
                job.tree.drop_read_prefix()
        for request in requests:
            request.pending = []
            if phase is Phase.DRAFTING:
                self._draft(request)
            elif phase is Phase.READING:
                request.phase = Phase.IDLE
            elif phase is Phase.GLUING:
                self._send_candidates(request)
            else:
                self._grow_branches(request)

    def _nodes_to_read(self, request: DraftRequest) -> list[int]:
        """What the request's phase reads next; committed tokens that are not read always come first."""
        tree = request.tree
        below = tree.proposal if request.phase is Phase.GLUING else request.pending
        unread = [
            node
            for node in below
            if node > tree.root and not tree.is_read[node] and self._is_readable(tree, node)
        ]
        return [*tree.unread_committed(), *sorted(unread)]

    def _is_readable(self, tree: DraftTree, node: int) -> bool:
        limit = self._source.max_position
        return limit is None or tree.position(node) < limit

    def _useful_depth(self, request: DraftRequest, committed_len: int) -> int:
        return request.useful_depth(
            committed_len, depth=self._shape.depth, max_position=self._source.max_position
        )

    def _room(self, tree: DraftTree) -> int:
        """Nodes that may be added, so that a proposal can still be settled after them."""
        return self._max_nodes - (len(tree) - 1 - tree.root) - self._shape.num_nodes

    def _draft(self, request: DraftRequest) -> None:
        """Choose what the proposal reads next; send it when it is complete."""
        tree = request.tree
        useful = self._useful_depth(request, tree.committed_len)
        anchor = Anchor(tree.root, useful)
        if useful > 0 and request.steps_left > 0:
            request.pending = grow(
                tree, [anchor], self._shape, room=self._room(tree), min_log_prob=self._min_log_prob
            )
            if any(self._is_readable(tree, node) for node in request.pending):
                request.steps_left -= 1
                return
        selection = anchor.selection
        if selection is None:
            selection = select(tree, tree.root, self._shape, depth=useful)
        self._submit(request, settle(tree, tree.root, selection))

    def _filler(self, tree: DraftTree, token_ids: list[int]) -> list[int]:
        """A chain below the root that no draft stands behind; nothing else hangs there after a miss."""
        nodes: list[int] = []
        for token in token_ids[: self._shape.num_nodes]:
            nodes.append(tree.add(token, nodes[-1] if nodes else tree.root))
        return nodes

    def _submit(self, request: DraftRequest, nodes: list[int]) -> None:
        tree = request.tree
        tree.submit(nodes)
        self._outbox.send(
            StageName.VERIFIER,
            Proposal(
                request_id=request.request_id,
                round_id=request.round_id,
                committed_len=tree.committed_len,
                token_ids=[tree.token_ids[node] for node in tree.proposal],
                parents=tree.proposal_parents(),
                source=request.source,
                ready_length=request.ready_length,
                draft_spans=request.spans,
            ),
        )
        request.spans = []
        can_prepare = self._has_cache and self._useful_depth(request, tree.committed_len + 1) > 0
        request.phase = Phase.GLUING if can_prepare else Phase.IDLE

    def _send_candidates(self, request: DraftRequest) -> None:
        """Tell the predictor what may follow the root and every proposed node."""
        tree = request.tree
        nodes = [tree.root, *tree.proposal]
        ids = np.full((len(nodes), self._num_candidates), -1, dtype=np.int32)
        log_probs = np.full(ids.shape, -np.inf, dtype=np.float32)
        for row, node in enumerate(nodes):
            following = tree.next_tokens[node]
            for column, (token, log_prob) in enumerate(following.ranked(ids.shape[1]) if following else []):
                ids[row, column] = token
                log_probs[row, column] = log_prob
        self._outbox.send(
            StageName.PREDICTOR,
            Candidates(
                request_id=request.request_id,
                round_id=request.round_id,
                token_ids=[tree.token_ids[node] for node in tree.proposal],
                parents=tree.proposal_parents(),
                candidate_ids=self._id_pool.write(ids),
                candidate_log_probs=self._log_prob_pool.write(log_probs),
            ),
        )
        request.phase = Phase.PLANNING

    def _grow_branches(self, request: DraftRequest) -> None:
        """Choose what the branches read next; rest when nothing worth reading is left."""
        tree = request.tree
        request.pending = grow(tree, request.branches, self._shape, room=self._room(tree))
        if not any(self._is_readable(tree, node) for node in request.pending):
            request.phase = Phase.IDLE


def _check_outcome(outcome: Outcome, request: DraftRequest) -> None:
    """Refuse an outcome that does not follow from what this request proposed.

    Such a one ends the run: the two sides disagree about what is committed, and the target would wait for
    a proposal that never comes.
    """
    tree = request.tree
    if not -1 <= outcome.accepted_node < len(tree.proposal):
        raise EngineDead(
            f"outcome for request {outcome.request_id}: node {outcome.accepted_node} was accepted, but "
            f"{len(tree.proposal)} were proposed"
        )
    num_new = tree.depth(tree.proposal_node(outcome.accepted_node)) + 1
    expected = (request.round_id, tree.committed_len + num_new)
    if (outcome.round_id, outcome.committed_len) != expected:
        raise EngineDead(
            f"outcome for request {outcome.request_id}: expected (round, committed tokens) {expected}, got "
            f"{(outcome.round_id, outcome.committed_len)}"
        )


def _check_plan(plan: Plan, request: DraftRequest) -> None:
    """Refuse a plan that names nodes which were not proposed."""
    num_nodes = len(request.tree.proposal)
    if not len(plan.nodes) == len(plan.token_ids) == len(plan.log_probs):
        raise ProtocolError(
            f"plan for request {plan.request_id}: {len(plan.nodes)} nodes but {len(plan.token_ids)} tokens "
            f"and {len(plan.log_probs)} log-probabilities"
        )
    if any(not -1 <= node < num_nodes for node in plan.nodes):
        raise ProtocolError(
            f"plan for request {plan.request_id}: expected nodes from -1 to {num_nodes - 1}, got {plan.nodes}"
        )


def build(context: StageContext) -> DraftSpeculator:
    """Factory for the stage process."""
    return DraftSpeculator(msgspec.msgpack.decode(context.settings, type=RunConfig), context)
