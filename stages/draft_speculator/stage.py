"""The draft-speculator: guesses tokens, and owns the speculation cache.

After an `Outcome` it answers with the next `Proposal`: from the cache on a hit, drafted now on a miss, and
always drafted in linear speculation. The outcomes of a batch are answered together, because whoever has to
be waited for keeps all others waiting. With `prepare_outcomes` it then goes on while the target verifies: it
reads what it proposed (the glue step), sends the predictor the likeliest tokens after every node, and drafts
a continuation for each outcome of the returned plan, one level a slice. `Stage.work` is called only while the
inbox is empty, so an outcome interrupts the drafting between two steps, and what is ready is served.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import msgspec

from conf.proposal_size import draft_nodes, submitted_nodes
from conf.schema import Backup, PlanMode, RunConfig
from pipeline.errors import RequestError
from pipeline.log import get_logger
from pipeline.messages import (
    BeginDraft,
    Candidates,
    DraftCapacity,
    EndDraft,
    Outcome,
    Plan,
    ProposalSource,
    SpeculatorMessage,
    StageName,
)
from pipeline.spans import SpanKind
from pipeline.stage import KernelTracer, Stage, StageContext
from pipeline.tensor_pool import TensorPool
from stages.draft_speculator.candidate_pools import CandidatePools
from stages.draft_speculator.checks import check_outcome, check_plan
from stages.draft_speculator.draft_laws import LawWriter, candidates_of
from stages.draft_speculator.draft_reader import DraftReader
from stages.draft_speculator.draft_request import DraftRequest, Phase
from stages.draft_speculator.draft_source import DraftSource
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.drawn_tokens import DrawnTokens
from stages.draft_speculator.growth import Anchor, Entry, Shape, add_unread, find_unread, select
from stages.draft_speculator.learning import RoundTally, Verdict
from stages.draft_speculator.load_source import load_source
from stages.draft_speculator.measures import Measures, Way
from stages.draft_speculator.ngram_draft import NgramIndex
from stages.draft_speculator.planner import OnlinePlanner, Planner
from stages.draft_speculator.proposal_writer import ProposalWriter
from stages.model.kernel_trace import TorchTracer

_log = get_logger(__name__)

_ROUNDS_OF_A_CHUNK = 2
"""While speculation rests the target may run that many rounds in the time of a chunk of the draft's."""
_MOST_BEHIND = 32
"""Committed tokens that a draft step may read beside what it drafts. The target does not wait for more."""


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
        self._tally = RoundTally(self._measures)
        planner = OnlinePlanner if speculation.plan is PlanMode.auto else Planner
        self._planner = planner(
            self._shape, self._measures, min_path_prob=speculation.min_path_prob, budget=self._budget
        )
        self._requests: dict[str, DraftRequest] = {}
        self._is_turn_of_reading = True
        self._choosing_ns = 0
        """How long it took to choose what the next step reads."""
        self._verdicts: list[Verdict] = []
        """To learn from..."""
        self._left_behind: list[object] = []
        """...and what they made untrue. Both takes longer than to answer an outcome, so that comes first."""

    # --- life ----------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Load the draft and export the pools for the predictor's candidates."""
        self._source = self._source_given or load_source(self._config, num_ranked=self._shape.most_children)
        self._reader = DraftReader(self._source, self._measures, self._spans)
        self._proposals = ProposalWriter(
            self._shape,
            self._planner,
            LawWriter.of(self._config, self._source, self._context.pools),
            backup=self._backup,
            num_look_up=self._num_look_up,
        )
        if self._has_cache:
            # The predictor may want as many tokens beside the children of a node as there are branches.
            self._candidate_pools = CandidatePools(
                self._context.pools,
                max_rows=self._most_submitted + 1,
                width=self._budget + self._shape.most_children + (self._num_look_up > 0),
                num_requests=self._config.max_requests,
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
                if message.num_following == 0:
                    self._tally.end(message)
                    self._answer()
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
            is_prepared=self._planner.prepares(),
        )
        if self._num_look_up or self._backup is not Backup.sequential:
            request.text = NgramIndex()
            request.text.append(token_ids)
        self._requests[message.request_id] = request
        num_prompt, limit = len(token_ids), self._source.max_position
        if self._useful_depth(request, num_prompt + 1) > 0:
            if self._is_time_to_read(request, rest_left=self._planner.rest_left):
                request.phase = Phase.READING
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
        check_outcome(outcome, request)
        self._verdicts.append(Verdict(tree.proposal_parents(), request.submitted, outcome.accepted_node))
        self._tally.add(request, outcome)
        if request.text is not None:
            accepted = tree.path(tree.proposal_node(outcome.accepted_node))
            request.text.append([*accepted, outcome.bonus_token])
        self._left_behind += [tree.next_tokens, tree.children(), request.branches]
        rerooting = tree.reroot(outcome.accepted_node, outcome.bonus_token)
        if request.can_draft:
            self._source.reroot(request.request_id, rerooting, tree)
        tree.drop_read_prefix()
        request.next_round()
        if outcome.ends_rest:
            request.rest_left = 0
        request.phase = Phase.ANSWERING

    def _answer(self) -> None:
        """Answer all outcomes of a forward: with what is ready, with what is drafted now, or to rest."""
        requests = self._in_phase(Phase.ANSWERING)
        self._measures.num_waiting = sum(
            r.is_new and r.phase is not Phase.ANSWERING for r in self._requests.values()
        )
        rounds: int | None = None
        if resting := [request for request in requests if request.rest_left > 0]:
            # The target runs the coming round of these by itself. What has joined rests as long as they do.
            rounds = resting[0].rest_left - 1
            self._planner.goes_on_resting(rounds)
        elif any(request.can_draft for request in requests):
            rounds = self._planner.rest_rounds() or None
        if rounds is not None:
            for request in requests:
                if request.rest_left > 0:
                    self._rest(request, rounds)
                else:
                    # Who joins a rest ends it with the others.
                    num_requests = resting[0].rest_batch if resting else len(requests)
                    self._begin_rest(request, rounds, num_requests=num_requests)
            return
        self._read_new_prompts()
        hits: list[DraftRequest] = []
        missed: list[DraftRequest] = []
        is_prepared = self._planner.prepares()
        for request in requests:
            was_prepared = request.is_prepared
            request.choose_way(is_prepared=is_prepared)
            request.source, request.ready_length = ProposalSource.DRAFT, 0
            request.is_behind = len(request.tree.unread_committed()) > _MOST_BEHIND
            if request.is_behind:
                self._answer_unprepared(request)
            else:
                is_hit = was_prepared and self._look_up(request)
                (hits if is_hit else missed).append(request)
        for request in hits:
            request.steps_left = self._shape.depth if self._planner.drafts_on() else 0
        may_wait = self._may_wait(missed, has_hits=bool(hits))
        for request in missed:
            request.steps_left = self._shape.depth if may_wait else 0
            if not may_wait:
                request.source = ProposalSource.BACKUP
        self._draft([*hits, *missed])

    def _begin_rest(self, request: DraftRequest, rounds: int, *, num_requests: int) -> None:
        """Propose nothing now, nor for so many rounds after it while more than half of the batch is left."""
        request.rest_left, request.rest_batch = rounds, num_requests
        request.way, request.is_behind = Way.PLAIN, False
        request.source, request.ready_length = ProposalSource.DRAFT, 0
        self._propose(request, [], useful=0)
        self._rest(request, rounds)

    def _rest(self, request: DraftRequest, rounds: int) -> None:
        """Let the target run this round, and so many after it. Before it ends, read what was missed."""
        request.rest_left = rounds
        request.due_ns = time.monotonic_ns() + self._measures.verification_ns(len(self._requests))
        request.phase = Phase.IDLE
        is_useful = self._useful_depth(request, request.tree.committed_len + rounds + 1) > 0
        if is_useful and self._is_time_to_read(request, rest_left=rounds):
            request.phase = Phase.READING

    def _is_time_to_read(self, request: DraftRequest, *, rest_left: int) -> bool:
        """Whether a rest of so many rounds is over about when what is unread has been read.

        Not before: others of the rest's rounds would be slowed, and it may be for nothing.
        """
        num_chunks = math.ceil(len(request.tree.unread_committed()) / self._config.placement.prefill_chunk)
        return rest_left < max(_ROUNDS_OF_A_CHUNK * num_chunks, 1)

    def _read_new_prompts(self) -> None:
        """Those that came in a rest, which is over now."""
        for request in self._requests.values():
            tree = request.tree
            is_unread = request.is_new and request.phase is Phase.IDLE and not tree.is_read[tree.root]
            if is_unread and self._useful_depth(request, tree.committed_len + 1) > 0:
                request.phase = Phase.READING

    def _look_up(self, request: DraftRequest) -> bool:
        """Whether something was prepared for the outcome that came."""
        start_ns = time.monotonic_ns()
        ready = self._select(request.tree, depth=self._shape.depth)
        request.ready_length = len(ready)
        if self._spans.is_on:
            self._spans.add(
                SpanKind.LOOKUP,
                start_ns,
                time.monotonic_ns(),
                request_id=request.request_id,
                round_id=request.round_id,
                count=len(ready),
            )
        self._measures.hits.add(bool(ready))
        request.source = ProposalSource.HIT if ready else ProposalSource.BACKUP
        return bool(ready)

    def _may_wait(self, missed: list[DraftRequest], *, has_hits: bool) -> bool:
        """Whether the target may wait while proposals for the missed outcomes are drafted.

        Those that hit never wait for the others by configuration alone: a round later a missed one is ready,
        too. The planner, where it has figures, weighs every step instead.
        """
        if has_hits and not self._planner.drafts_on():
            return False
        if not self._planner.prepares():
            return True  # it was found to be worth it, for all of them
        if self._backup is not Backup.auto:
            return self._backup is Backup.sequential
        return self._planner.pays_to_wait(
            [self._proposals.look_up(r, self._useful_depth(r, r.tree.committed_len)) for r in missed]
        )

    def _answer_unprepared(self, request: DraftRequest) -> None:
        """The draft is far behind: let the target go on, and read meanwhile."""
        request.source = ProposalSource.BACKUP if self._has_cache else ProposalSource.DRAFT
        committed_len = request.tree.committed_len
        self._propose(request, [], useful=self._useful_depth(request, committed_len))
        if self._useful_depth(request, committed_len + 1) > 0:
            request.phase = Phase.READING

    def _select(self, tree: DraftTree, *, depth: int) -> list[Entry]:
        return select(tree, tree.root, self._planner.shape, depth=depth, valuation=self._planner.log_value)

    def _take_plan(self, plan: Plan) -> None:
        request = self._requests.get(plan.request_id)
        if request is None or request.round_id != plan.round_id or request.phase is not Phase.PLANNING:
            self.num_late_messages += 1
            return
        tree = request.tree
        check_plan(plan, request)
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

    # --- work ------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """One draft step: for the requests that the target waits for, else for one kind of preparation.

        A chunk of a prompt is read in every other slice, so that neither it nor the preparation has to wait
        for the end of the other.
        """
        if drafting := self._in_phase(Phase.DRAFTING):
            self._reader.step(SpanKind.DRAFT, drafting, choosing_ns=self._choosing_ns)
            self._draft(drafting)
            return True
        self._tidy_up()
        reading = self._in_phase(Phase.READING)
        if not (reading and self._is_turn_of_reading) and self._prepare():
            self._is_turn_of_reading = True
            return True
        if reading:
            self._is_turn_of_reading = False
            self._reader.read_chunk(reading, size=self._config.placement.prefill_chunk)
            is_resting = any(request.rest_left > 0 for request in self._requests.values())
            for request in reading:
                if request.tree.is_read[request.tree.root]:
                    can_prepare = request.is_prepared and self._planner.prepares() and not is_resting
                    request.phase = Phase.GLUING if can_prepare else Phase.IDLE
        return bool(reading)

    def _tidy_up(self) -> None:
        """What outcomes left to do, and nobody waits for."""
        self._left_behind.clear()
        for verdict in self._verdicts:
            verdict.teach(self._measures)
        self._verdicts.clear()
        for request in self._requests.values():
            if request.text is not None:
                request.text.catch_up()

    def _prepare(self) -> bool:
        """One step towards the coming outcomes; whether there was one to take."""
        if gluing := self._in_phase(Phase.GLUING):
            self._reader.step(SpanKind.GLUE, gluing)
            for request in gluing:
                self._outbox.send(StageName.PREDICTOR, self._candidates(request))
                request.phase = Phase.PLANNING
            return True
        if branching := self._in_phase(Phase.BRANCHING):
            branching = self._choose_branches(branching)
            if branching:
                self._reader.step(SpanKind.BRANCH, branching, choosing_ns=self._choosing_ns)
            return bool(branching)
        return False

    def _in_phase(self, phase: Phase) -> list[DraftRequest]:
        return [request for request in self._requests.values() if request.phase is phase]

    def _useful_depth(self, request: DraftRequest, committed_len: int) -> int:
        return request.useful_depth(
            committed_len, depth=self._shape.depth, max_position=self._source.max_position
        )

    def _room(self, tree: DraftTree) -> int:
        """Nodes that may be added, so that a proposal can still be settled after them."""
        return self._max_nodes - (len(tree) - 1 - tree.root) - self._most_submitted

    def _draft(self, requests: list[DraftRequest]) -> None:
        """Choose what the proposals read next; send those that are complete."""
        anchors: list[list[Anchor]] = []
        for request in requests:
            useful = self._useful_depth(request, request.tree.committed_len)
            anchors.append([request.grow_proposal(useful)] if useful > 0 and request.steps_left > 0 else [])
        self._choose_reads(requests, anchors, self._planner.waiting_reads)
        for request, below in zip(requests, anchors, strict=True):
            if request.pending:
                request.steps_left -= 1
                request.phase = Phase.DRAFTING
                continue
            tree = request.tree
            useful = self._useful_depth(request, tree.committed_len)
            selection = below[0].selection if below else None
            if selection is None:
                selection = self._select(tree, depth=useful)
            # A drawn token stays: its law would be another one if it stayed only where it is likely.
            if not isinstance(tree.next_tokens[tree.root], DrawnTokens):
                others = sum(1 + len(r.tree.proposal) for r in self._requests.values() if r is not request)
                selection = self._planner.keep(selection, other_rows=others)
            self._propose(request, selection, useful=useful)

    def _choose_branches(self, requests: list[DraftRequest]) -> list[DraftRequest]:
        """Choose what the branches read next. The others rest: nothing that is worth reading is left."""
        # The forward that all of them wait for starts with the last of their proposals.
        left_ns = max(r.due_ns for r in requests) - time.monotonic_ns()
        self._choose_reads(
            requests,
            [request.branches for request in requests],
            lambda log_values: self._planner.branch_reads(log_values, left_ns=left_ns),
        )
        for request in requests:
            if not request.pending:
                request.phase = Phase.IDLE
        return [request for request in requests if request.pending]

    def _choose_reads(
        self,
        requests: list[DraftRequest],
        anchors: list[list[Anchor]],
        count_reads: Callable[[list[list[float]]], list[int]],
    ) -> None:
        """Set what each request reads next below its anchors; nothing where nothing is worth it, or readable.

        count_reads: from the log values of what each could read to how many it does.
        """
        start_ns = time.monotonic_ns()
        shape, valuation = self._planner.shape, self._planner.log_value
        unread = [
            find_unread(request.tree, below, shape, valuation=valuation)
            for request, below in zip(requests, anchors, strict=True)
        ]
        counts = count_reads([[node.log_value for node in nodes] for nodes in unread])
        for request, below, nodes, count in zip(requests, anchors, unread, counts, strict=True):
            tree = request.tree
            pending = add_unread(tree, below, nodes[:count], room=self._room(tree))
            request.pending = pending if any(self._reader.is_readable(tree, node) for node in pending) else []
        self._choosing_ns = time.monotonic_ns() - start_ns

    def _propose(self, request: DraftRequest, entries: list[Entry], *, useful: int) -> None:
        """Send a proposal of at most `useful` levels, and go on to what comes after it."""
        self._outbox.send(StageName.VERIFIER, self._proposals.submit(request, entries, useful=useful))
        num_rows = sum(1 + len(r.tree.proposal) for r in self._requests.values())
        request.due_ns = request.submitted_ns + self._measures.verification_ns(num_rows)
        can_prepare = request.is_prepared and self._useful_depth(request, request.tree.committed_len + 1) > 0
        request.phase = Phase.GLUING if can_prepare else Phase.IDLE

    def _candidates(self, request: DraftRequest) -> Candidates:
        """What may follow the root and every proposed node, for the predictor."""
        tree = request.tree
        nodes = [tree.root, *tree.proposal]
        ids, log_probs = self._candidate_pools.write(
            [candidates_of(tree.next_tokens[node], self._candidate_pools.width) for node in nodes]
        )
        return Candidates(
            request_id=request.request_id,
            round_id=request.round_id,
            token_ids=[tree.token_ids[node] for node in tree.proposal],
            parents=tree.proposal_parents(),
            num_branches=self._planner.num_branches(),
            candidate_ids=ids,
            candidate_log_probs=log_probs,
            is_filler=request.source is ProposalSource.BACKUP
            and all(node.log_prob is None for node in request.submitted),
            is_drawn=request.is_drawn,
        )


def build(context: StageContext) -> DraftSpeculator:
    """Factory for the stage process."""
    return DraftSpeculator(msgspec.msgpack.decode(context.settings, type=RunConfig), context)
