"""The draft-speculator: guesses tokens, and owns the speculation cache.

After an `Outcome` it answers with the next `Proposal`: from the cache on a hit, drafted now on a miss, and
always drafted in linear speculation. With `prepare_outcomes` it then goes on while the target verifies:
it reads what it proposed (the glue step), sends the predictor the likeliest tokens after every node, and
drafts a continuation for each outcome of the returned plan, one level a slice. `Stage.work` is called
only while the inbox is empty, so an outcome interrupts the drafting between two steps, and what is ready
is served.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
import numpy as np

from conf.proposal_size import draft_nodes, submitted_nodes
from conf.schema import Backup, PlanMode, RunConfig
from pipeline.errors import EngineDead, ProtocolError, RequestError
from pipeline.log import get_logger
from pipeline.messages import (
    BeginDraft,
    Candidates,
    DraftCapacity,
    EndDraft,
    Outcome,
    Plan,
    Proposal,
    ProposalSource,
    SpeculatorMessage,
    StageName,
)
from pipeline.spans import SpanKind
from pipeline.stage import KernelTracer, Stage, StageContext
from pipeline.tensor_pool import PoolSpec, TensorPool
from stages.draft_speculator.draft_laws import LawWriter, candidates_of, fan_outs_below
from stages.draft_speculator.draft_request import DraftRequest, Phase, Submitted
from stages.draft_speculator.draft_source import DraftSource, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.drawn_tokens import DrawnTokens
from stages.draft_speculator.fillers import hang, random_tokens
from stages.draft_speculator.growth import Anchor, Entry, Shape, grow, select, settle
from stages.draft_speculator.learning import learn
from stages.draft_speculator.load_source import load_source
from stages.draft_speculator.measures import Measures
from stages.draft_speculator.ngram_draft import LookedUp, NgramIndex
from stages.draft_speculator.planner import OnlinePlanner, Planner
from stages.model.kernel_trace import TorchTracer

_log = get_logger(__name__)

_SLOTS_PER_REQUEST = 4
"""Candidate tensors a request may have under way: the predictor is at most a round behind."""
_MOST_STEP_ROWS = 32
"""Of one request: a reading of more is that of a prompt, and says little about steps."""
_KIND_OF_PHASE = {
    Phase.READING: SpanKind.READ,
    Phase.DRAFTING: SpanKind.DRAFT,
    Phase.GLUING: SpanKind.GLUE,
    Phase.BRANCHING: SpanKind.BRANCH,
}
"""What a profile calls the reading of each phase."""


class DraftSpeculator(Stage):
    """See the module docstring. Tests pass a source; a process makes it from the configuration."""

    accepts = SpeculatorMessage

    def __init__(self, config: RunConfig, context: StageContext, source: DraftSource | None = None) -> None:
        speculation = config.speculation
        self._config = config
        self._context = context
        self._outbox = context.outbox
        self._spans = context.spans
        self._source_given = source
        self._has_cache = speculation.prepare_outcomes
        self._shape = Shape.of(speculation)
        self._backup = speculation.backup if self._has_cache else Backup.sequential
        self._num_look_up = speculation.draft.look_up
        self._most_submitted = submitted_nodes(speculation)
        self._max_nodes = draft_nodes(speculation)
        self._budget = speculation.budget if self._has_cache else 0
        self._measures = Measures()
        planner = OnlinePlanner if speculation.plan is PlanMode.auto else Planner
        self._planner = planner(
            self._shape, self._measures, min_path_prob=speculation.min_path_prob, budget=self._budget
        )
        self._requests: dict[str, DraftRequest] = {}

    # --- life ----------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Load the draft and export the pools for the predictor's candidates."""
        self._source = self._source_given or load_source(self._config, num_ranked=self._shape.most_children)
        self._laws = LawWriter.of(self._config, self._source, self._context.pools)
        if self._has_cache:
            num_slots = _SLOTS_PER_REQUEST * self._config.max_requests
            shape = (self._most_submitted + 1, self._num_candidates)
            self._id_pool = self._context.pools.export(
                PoolSpec(name="candidate_ids", num_slots=num_slots, shape=shape, dtype="int32")
            )
            self._log_prob_pool = self._context.pools.export(
                PoolSpec(name="candidate_log_probs", num_slots=num_slots, shape=shape, dtype="float32")
            )

    def connect(self, pools: Mapping[str, TensorPool]) -> None:
        """Nothing to read; tell the verifier what the draft has room for."""
        source = self._source
        self._outbox.send(
            StageName.VERIFIER,
            DraftCapacity(
                num_pages=source.num_pages,
                page_size=source.page_size,
                num_nodes=self._max_nodes,
                max_position=source.max_position,
            ),
        )

    @property
    def _num_candidates(self) -> int:
        """Tokens that the predictor is told of after each node: it may want as many beside the children."""
        return self._budget + self._shape.most_children + (self._num_look_up > 0)

    def kernel_tracer(self) -> KernelTracer:
        """What PyTorch does for the draft."""
        return TorchTracer()

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
        can_draft, num_read = True, 0
        token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        try:
            num_read = self._source.begin(message, max_nodes=self._max_nodes)
        except RequestError as error:
            can_draft = False
            _log.warning("request %s goes on without a draft: %s", message.request_id, error)
        request = DraftRequest(
            request_id=message.request_id,
            seed=message.sampling.seed,
            tree=DraftTree(token_ids, num_read=num_read),
            max_len=message.max_len,
            can_draft=can_draft,
            phase=Phase.IDLE,
            round_id=message.round_id,
        )
        if self._num_look_up or self._backup is not Backup.sequential:
            request.text = NgramIndex()
            request.text.append(token_ids)
        self._requests[message.request_id] = request
        num_prompt, limit = len(token_ids), self._source.max_position
        if self._useful_depth(request, num_prompt + 1) > 0:
            # The prefill is round 0 with an empty proposal: its outcome can be prepared like any other.
            request.phase = Phase.GLUING if self._has_cache else Phase.READING
        elif limit is not None and num_prompt >= limit:
            _log.warning(
                "request %s goes on without a draft: it has %d tokens, the draft reads at most %d",
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
        learn(self._measures, request, outcome, num_active=len(self._requests))
        if request.text is not None:
            accepted = tree.path(tree.proposal_node(outcome.accepted_node))
            request.text.append([*accepted, outcome.bonus_token])
        rerooting = tree.reroot(outcome.accepted_node, outcome.bonus_token)
        if request.can_draft:
            self._source.reroot(request.request_id, rerooting, tree)
        tree.drop_read_prefix()
        request.next_round()
        if request.rest_left > 0:
            self._rest(request)
        elif request.can_draft and (rest := self._planner.rest_rounds()):
            request.rest_left = rest
            request.source, request.ready_length = ProposalSource.DRAFT, 0
            self._submit(request, [], [])
            request.is_resting, request.phase = True, Phase.IDLE
        else:
            self._answer(request)

    def _rest(self, request: DraftRequest) -> None:
        """The target runs a round by itself. During the last one the draft reads what it has missed."""
        request.rest_left -= 1
        if request.rest_left > 0 or self._useful_depth(request, request.tree.committed_len + 1) == 0:
            request.phase = Phase.IDLE
        else:
            request.phase = Phase.GLUING if self._has_cache else Phase.READING

    def _answer(self, request: DraftRequest) -> None:
        """Serve what is ready, or draft, or fill in."""
        start_ns = time.monotonic_ns()
        tree, depth = request.tree, self._shape.depth
        request.is_resting = False
        ready = self._select(tree, depth=depth) if self._has_cache else []
        request.ready_length = len(ready)
        if self._has_cache:
            self._note(SpanKind.LOOKUP, (start_ns, time.monotonic_ns()), request, count=len(ready))
        if ready:
            request.source = ProposalSource.HIT
            may_wait = self._planner.drafts_on()
        else:
            request.source = ProposalSource.BACKUP if self._has_cache else ProposalSource.DRAFT
            may_wait = self._may_draft(request)
        request.phase = Phase.DRAFTING
        request.steps_left = depth if may_wait else 0
        self._draft(request)

    def _may_draft(self, request: DraftRequest) -> bool:
        """Whether the draft computes although nothing is ready, and the target waits."""
        if self._backup is not Backup.auto:
            return self._backup is Backup.sequential
        useful = self._useful_depth(request, request.tree.committed_len)
        return self._planner.pays_to_wait(self._filler(request, useful))

    def _select(self, tree: DraftTree, *, depth: int) -> list[Entry]:
        return select(tree, tree.root, self._shape, depth=depth, valuation=self._planner.log_value)

    def _take_plan(self, plan: Plan) -> None:
        request = self._requests.get(plan.request_id)
        if request is None or request.round_id != plan.round_id or request.phase is not Phase.PLANNING:
            self.num_late_messages += 1
            return
        tree = request.tree
        _check_plan(plan, request)
        request.fan_outs = plan.next_fan_outs
        for accepted_index, bonus_token, log_prob in zip(
            plan.nodes, plan.token_ids, plan.log_probs, strict=True
        ):
            depth_of_node = tree.depth(tree.proposal_node(accepted_index))
            useful = self._useful_depth(request, tree.committed_len + depth_of_node + 1)
            if useful == 0 or len(request.branches) == self._budget or self._room(tree) <= 0:
                continue
            node = tree.add_branch(accepted_index, bonus_token)
            if node is not None and all(node != branch.node for branch in request.branches):
                request.branches.append(Anchor(node, useful, min(log_prob, 0.0)))
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
            ExtendJob(request_id=r.request_id, tree=r.tree, nodes=nodes, fan_outs=self._fan_outs(r, nodes))
            for r in requests
            if (nodes := self._nodes_to_read(r))
        ]
        if jobs:
            start_ns = time.monotonic_ns()
            self._source.extend(jobs)
            span = (start_ns, time.monotonic_ns())
            if (num_rows := sum(len(job.nodes) for job in jobs)) <= _MOST_STEP_ROWS * len(jobs):
                self._measures.step.add(num_rows, span[1] - span[0])
            self._note(_KIND_OF_PHASE[phase], span, self._requests[jobs[0].request_id], count=num_rows)
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

    def _note(self, kind: SpanKind, span: tuple[int, int], request: DraftRequest, *, count: int) -> None:
        """Record a span for a profile, if there is one."""
        if self._spans.is_on:
            self._spans.add(
                kind, *span, request_id=request.request_id, round_id=request.round_id, count=count
            )

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

    def _fan_outs(self, request: DraftRequest, nodes: list[int]) -> list[int]:
        anchors = [branch.node for branch in request.branches]
        return fan_outs_below(request.tree, nodes, anchors=anchors, by_depth=request.fan_outs)

    def _is_readable(self, tree: DraftTree, node: int) -> bool:
        limit = self._source.max_position
        return limit is None or tree.position(node) < limit

    def _useful_depth(self, request: DraftRequest, committed_len: int) -> int:
        return request.useful_depth(
            committed_len, depth=self._shape.depth, max_position=self._source.max_position
        )

    def _room(self, tree: DraftTree) -> int:
        """Nodes that may be added, so that a proposal can still be settled after them."""
        return self._max_nodes - (len(tree) - 1 - tree.root) - self._most_submitted

    def _draft(self, request: DraftRequest) -> None:
        """Choose what the proposal reads next; send it when it is complete."""
        tree = request.tree
        useful = self._useful_depth(request, tree.committed_len)
        anchor = Anchor(tree.root, useful)
        if useful > 0 and request.steps_left > 0:
            request.pending = grow(
                tree,
                [anchor],
                self._shape,
                room=self._room(tree),
                num_reads=self._planner.waiting_reads,
                valuation=self._planner.log_value,
            )
            if any(self._is_readable(tree, node) for node in request.pending):
                request.steps_left -= 1
                return
        selection = anchor.selection
        if selection is None:
            selection = self._select(tree, depth=useful)
        # A drawn token stays: its law would be another one if it stayed only where it is likely.
        if not isinstance(tree.next_tokens[tree.root], DrawnTokens):
            others = sum(1 + len(r.tree.proposal) for r in self._requests.values() if r is not request)
            selection = self._planner.keep(selection, other_rows=others)
        self._propose(request, selection)

    def _propose(self, request: DraftRequest, entries: list[Entry]) -> None:
        """Submit a selection, with what was looked up beside it or, after a miss, in its place."""
        tree = request.tree
        nodes = settle(tree, tree.root, entries)
        submitted = [Submitted(entry.log_prob) for entry in entries]
        useful = self._useful_depth(request, tree.committed_len)
        is_filler = not nodes and request.source is ProposalSource.BACKUP
        most = self._shape.num_nodes if is_filler else self._num_look_up
        if request.text is not None and useful > 0 and most > 0:
            chain = self._filler(request, min(useful, self._shape.depth))
            added = hang(tree, nodes, [token.token_id for token in chain], most=most)
            base = tree.depth(added[0]) - 1 if added else 0
            submitted += [Submitted(None, token.matched) for token in chain[base : base + len(added)]]
            nodes += added
        self._submit(request, nodes, submitted)

    def _filler(self, request: DraftRequest, count: int) -> list[LookedUp]:
        """Up to `count` tokens to follow the root that cost no draft step."""
        assert request.text is not None, "only asked for where the text is kept"
        if self._backup is Backup.random:
            text, position = request.text.token_ids, request.tree.committed_len
            tokens = random_tokens(text, seed=request.seed, position=position, count=count)
            return [LookedUp(token, 0) for token in tokens]
        return self._planner.keep_looked_up(request.text.chain(count))

    def _submit(self, request: DraftRequest, nodes: list[int], submitted: list[Submitted]) -> None:
        tree = request.tree
        tree.submit(nodes)
        request.submitted = submitted
        is_drafted = [node.log_prob is not None for node in submitted]
        laws = None if self._laws is None else self._laws.write(tree, is_drafted)
        request.is_drawn = laws is not None
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
                rest_rounds=request.rest_left,
                plan=self._planner.figures(),
                draft_spans=request.spans,
                laws=laws,
            ),
        )
        request.spans = []
        num_rows = sum(1 + len(r.tree.proposal) for r in self._requests.values())
        request.submitted_ns = time.monotonic_ns()
        request.due_ns = request.submitted_ns + self._measures.verification_ns(num_rows)
        can_prepare = self._has_cache and self._useful_depth(request, tree.committed_len + 1) > 0
        request.phase = Phase.GLUING if can_prepare else Phase.IDLE

    def _send_candidates(self, request: DraftRequest) -> None:
        """Tell the predictor what may follow the root and every proposed node."""
        tree = request.tree
        nodes = [tree.root, *tree.proposal]
        ids = np.full((len(nodes), self._num_candidates), -1, dtype=np.int32)
        log_probs = np.full(ids.shape, -np.inf, dtype=np.float32)
        for row, node in enumerate(nodes):
            following = candidates_of(tree.next_tokens[node], ids.shape[1])
            for column, (token, log_prob) in enumerate(following):
                ids[row, column] = token
                log_probs[row, column] = log_prob
        self._outbox.send(
            StageName.PREDICTOR,
            Candidates(
                request_id=request.request_id,
                round_id=request.round_id,
                token_ids=[tree.token_ids[node] for node in tree.proposal],
                parents=tree.proposal_parents(),
                num_branches=self._planner.num_branches(),
                candidate_ids=self._id_pool.write(ids),
                candidate_log_probs=self._log_prob_pool.write(log_probs),
                is_filler=request.source is ProposalSource.BACKUP
                and all(node.log_prob is None for node in request.submitted),
                is_drawn=request.is_drawn,
            ),
        )
        request.phase = Phase.PLANNING

    def _grow_branches(self, request: DraftRequest) -> None:
        """Choose what the branches read next; rest when nothing worth reading is left."""
        tree = request.tree
        left_ns = request.due_ns - time.monotonic_ns()
        request.pending = grow(
            tree,
            request.branches,
            self._shape,
            room=self._room(tree),
            num_reads=lambda log_values: self._planner.branch_reads(log_values, left_ns=left_ns),
            valuation=self._planner.log_value,
        )
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
