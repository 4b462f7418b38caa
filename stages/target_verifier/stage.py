"""The target-verifier: owns the truth. It admits requests, verifies proposals, commits tokens.

Each slice of `work` is one forward, in which the running requests have a round and new ones read a chunk of
their prompts (`schedule`), or noise made ahead while there is nothing to verify. Prompt text, drafting and
outcome prediction are other stages'.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from conf.proposal_size import proposal_depth, submitted_nodes
from conf.schema import DraftKind, DType, RunConfig
from pipeline.errors import ConfigError, EngineDead, ProtocolError, RequestError
from pipeline.log import get_logger
from pipeline.messages import (
    BeginDraft,
    BeginText,
    CancelRequest,
    Committed,
    DraftCapacity,
    EndDraft,
    FinishReason,
    Outcome,
    Proposal,
    ProposalSource,
    RequestFailed,
    Sampling,
    StageName,
    TokenizedRequest,
    TokenLogprobs,
    VerifierMessage,
)
from pipeline.spans import SpanKind
from pipeline.stage import KernelTracer, Stage, StageContext
from pipeline.tensor_pool import TensorPool
from stages.grammar import GrammarCompiler, begin_grammar
from stages.incremental_text import TextDecoder
from stages.model.emulated_runner import EmulatedRunner, emulated_shape
from stages.model.kernel_trace import TorchTracer
from stages.model.kv_budget import draft_shape, plan_kv
from stages.model.pages import KVHandle
from stages.model.runner import ModelRunner, Runner
from stages.model.shape import ModelShape
from stages.model.token_law import TokenLaw
from stages.model.weights import LoadedModel, load_model
from stages.target_verifier.admission import Admission
from stages.target_verifier.checks import fault_of_options, fault_of_prompt, fault_of_tree
from stages.target_verifier.draft_watch import DraftWatch
from stages.target_verifier.judge import Judge
from stages.target_verifier.logprobs import token_logprobs
from stages.target_verifier.page_ledger import PageLedger
from stages.target_verifier.rejection import read_laws
from stages.target_verifier.round_clock import RoundClock, TargetClock, merge_spans
from stages.target_verifier.round_result import RoundResult, compute
from stages.target_verifier.schedule import Step, next_step
from stages.target_verifier.sequence import Sequence
from stages.target_verifier.stop_text import StopText
from stages.target_verifier.stopping import Ending, StopRules
from stages.vocabulary import load_tokenizer

_log = get_logger(__name__)


class TargetVerifier(Stage):
    """See the module docstring. Tests pass a model, a decoder for stop strings, and a compiler of grammars; a
    process loads them from `config.model.path`, the decoder when it is first needed."""

    accepts = VerifierMessage

    def __init__(
        self,
        config: RunConfig,
        context: StageContext,
        model: LoadedModel | None = None,
        text_decoder: TextDecoder | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._config = config
        self._outbox = context.outbox
        self._spans = context.spans
        self._model = model
        self._text_decoder = text_decoder
        self._grammars_given = grammars
        self._has_draft = config.speculation.draft.kind is not DraftKind.none
        self._has_cache = config.speculation.prepare_outcomes
        self._max_nodes = submitted_nodes(config.speculation) if self._has_draft else 0
        self._pools: Mapping[str, TensorPool] = {}
        self._sequences: dict[str, Sequence] = {}
        self._by_draft_id: dict[str, Sequence] = {}
        self._held: list[tuple[StageName, Committed | Outcome]] = []
        """News of the last round that can wait until the next forward is under way."""
        self._clock = TargetClock()
        self._watch = DraftWatch(config.speculation.draft)

    # --- life ----------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Load the target, with its share of the memory for KV caches."""
        config = self._config
        self._grammars = self._grammars_given or GrammarCompiler.of_model(config.model.path)
        self._grammars.prepare()
        if config.model.is_emulated:
            self._max_context = config.model.max_context
            shape = emulated_shape(config.model.emulated.vocab_size)
            self._runner: Runner = EmulatedRunner.with_pages(
                config, is_draft=False, num_pages=self._num_pages(shape)
            )
        else:
            self._runner = self._load_runner()
        self._runner.kv.keeps_prefixes = config.placement.prefix_cache
        self._runner.warm_up()
        self._judge = Judge(
            config.speculation.verification,
            logits_dtype=torch.float64 if config.model.dtype is DType.float64 else torch.float32,
            max_depth=proposal_depth(config.speculation) if self._has_draft else 0,
        )
        self._ledger = PageLedger(
            self._runner.kv,
            max_context=self._max_context,
            num_nodes=self._max_nodes,
            has_draft=self._has_draft,
        )
        self._admission = Admission(
            self._ledger,
            max_requests=config.max_requests,
            max_context=self._max_context,
            new_sequence=self._new_sequence,
        )
        self._eos_token_ids = frozenset(self._runner.shape.eos_token_ids)
        self._vocab_ids = torch.arange(self._runner.shape.vocab_size)

    def _load_runner(self) -> ModelRunner:
        config, model = self._config, self._model
        if model is None:
            if config.model.path is None:
                raise ConfigError("model.path is not resolved: expected a local folder, got none")
            model = load_model(config.model.path, dtype=getattr(torch, config.model.dtype.value))
        self._model = None  # the runner keeps packed copies of the weights
        self._max_context = min(config.model.max_context, model.shape.max_position)
        return ModelRunner.with_pages(
            model,
            num_pages=self._num_pages(model.shape),
            page_size=config.placement.page_size,
            cpu_kernels=config.model.cpu_kernels,
            weight_format=config.model.weights,
            is_format_binding=True,
        )

    def _num_pages(self, shape: ModelShape) -> int:
        config = self._config
        plan = plan_kv(config, shape, draft_shape(config, shape))
        if plan.num_full_requests < config.max_requests:
            _log.warning(
                "the memory for KV caches (placement.kv_memory=%s) holds %.1f requests of "
                "model.max_context=%d, not max_requests=%d: long ones may wait, or be read again",
                config.placement.kv_memory,
                plan.num_full_requests,
                min(config.model.max_context, shape.max_position),
                config.max_requests,
            )
        return plan.target_pages

    def kernel_tracer(self) -> KernelTracer:
        """What PyTorch does for the target."""
        return TorchTracer()

    def connect(self, pools: Mapping[str, TensorPool]) -> None:
        """The pools in which the laws of drawn proposals come."""
        self._pools = pools

    def close(self) -> None:
        """Drop every request."""
        self._sequences.clear()
        self._by_draft_id.clear()

    # --- messages --------------------------------------------------------------------------------------

    def handle(self, message: VerifierMessage) -> None:
        """Queue a request, take a proposal or the draft's capacity, or cancel."""
        match message:
            case TokenizedRequest():
                self._enqueue(message)
            case Proposal():
                self._take_proposal(message)
            case DraftCapacity():
                self._ledger.set_draft(message)
            case CancelRequest():
                self._cancel(message.request_id)

    def _enqueue(self, request: TokenizedRequest) -> None:
        request_id = request.request_id
        if request_id in self._sequences or request_id in self._admission:
            fault: str | None = f"request id {request_id!r} is in use; choose another"
        else:
            fault = fault_of_prompt(
                request.prompt_token_ids, max_context=self._max_context, vocab_size=len(self._vocab_ids)
            ) or fault_of_options(
                request.sampling, eos_token_ids=self._eos_token_ids, vocab_size=len(self._vocab_ids)
            )
        if fault is None:
            self._admission.add(request)
        else:
            self._fail(request_id, fault)

    def _take_proposal(self, proposal: Proposal) -> None:
        sequence = self._by_draft_id.get(proposal.request_id)
        if sequence is None:
            self.num_late_messages += 1  # the request was cancelled while its proposal was under way
            return
        expected = (sequence.round_id, len(sequence.token_ids))
        got = (proposal.round_id, proposal.committed_len)
        what = f"proposal for request {proposal.request_id}: expected (round, committed tokens) {expected}"
        if proposal.round_id < sequence.round_id or (got == expected and sequence.proposal is not None):
            raise ProtocolError(f"{what}, got {got} once more")
        if got != expected:
            # The two sides disagree about what is committed: to wait for another proposal would be to hang.
            raise EngineDead(f"{what}, got {got}")
        fault = fault_of_tree(
            proposal.token_ids,
            proposal.parents,
            max_nodes=self._max_nodes,
            room=sequence.room,
            vocab_size=len(self._vocab_ids),
        )
        try:
            if fault is not None:
                raise ProtocolError(f"proposal for request {proposal.request_id}: {fault}")
            sequence.draft_laws = read_laws(proposal, self._pools, vocab_size=len(self._vocab_ids))
        except ProtocolError:
            # The target must not wait for a better one: verify nothing, and let the error be counted.
            proposal = msgspec.structs.replace(
                proposal,
                token_ids=[],
                parents=[],
                laws=None,
                ready_length=0,
                source=ProposalSource.BACKUP if self._has_cache else ProposalSource.DRAFT,
            )
            raise
        finally:
            sequence.proposal = proposal
            sequence.is_resting = proposal.rest_rounds is not None
            sequence.rest_rounds, sequence.rest_batch = proposal.rest_rounds or 0, proposal.rest_batch

    def _cancel(self, request_id: str) -> None:
        found = self._sequences.get(request_id) or self._admission.withdraw(request_id)
        if isinstance(found, TokenizedRequest):
            self._fail(request_id, "cancelled before it started")
        elif found is not None:
            self._commit(found, [], Ending(num_kept=0, finish_reason=FinishReason.CANCELLED))

    def _fail(self, request_id: str, reason: str) -> None:
        self._outbox.send(StageName.FRONTEND, RequestFailed(request_id=request_id, reason=reason))

    # --- work ------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Admit requests and run one forward, or make noise ahead."""
        self._admit()
        step = next_step(
            self._sequences.values(),
            has_draft=self._has_draft,
            chunk_size=self._config.placement.prefill_chunk,
        )
        if step is not None:
            self._make_room(step.rounds)
            step = step.of_those(self._sequences.values())
            if step.num_rows > 0:  # else all of it was pre-empted for a request whose turn comes now
                self._run(step)
            return True
        running = [sequence for sequence in self._sequences.values() if not sequence.is_prefilling]
        return self._make_noise_ahead(running)

    def _admit(self) -> None:
        """As many as the coming forward reads: one that comes later may begin with what is read by then."""
        chunk = self._config.placement.prefill_chunk
        while (length := self._admission.next_length) is not None:
            num_unread = sum(s.prefill_len - s.num_prefilled for s in self._sequences.values())
            if num_unread > 0 and num_unread + min(length, chunk) > chunk:
                return
            admitted = self._admission.next(num_active=len(self._sequences))
            if admitted is None:
                return
            self._start(admitted)

    def _make_room(self, sequences: list[Sequence]) -> None:
        """Have these hold the pages of their round; if there are too few, the youngest of all lose theirs."""
        for sequence in sorted(sequences, key=lambda s: s.arrival):
            while sequence.draft_id in self._by_draft_id and not self._ledger.grow(sequence):
                self._preempt(max(self._sequences.values(), key=lambda s: s.arrival))

    def _preempt(self, sequence: Sequence) -> None:
        """Take a request's KV away. It keeps all its tokens, and is read again once there is room."""
        self._send_held()
        self._drop_kv(sequence)
        sequence.preempt()
        self._admission.put_back(sequence)

    def _make_noise_ahead(self, sequences: list[Sequence]) -> bool:
        """One row of noise for a coming round, while the target would only wait."""
        start_ns = time.monotonic_ns()
        sequence = self._judge.make_noise_ahead(sequences)
        if sequence is None:
            return False
        self._note(SpanKind.NOISE, start_ns, [sequence], count=1)
        return True

    def _new_sequence(self, request: TokenizedRequest, kv: KVHandle) -> Sequence | None:
        """What is kept of a request. None, and it failed, if its grammar cannot be used."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        try:
            # A millisecond or a few, once for each grammar: the tokenizer has refused what is broken.
            grammar = begin_grammar(self._grammars, sampling, eos_token_ids=self._eos_token_ids)
        except RequestError as error:
            self._fail(request.request_id, str(error))
            return None
        clock = RoundClock(submitted_ns=request.submitted_ns, target=self._clock, has_cache=self._has_cache)
        clock.num_cached_prompt_tokens = kv.num_cached
        if sampling.stop or request.prompt_text is not None:
            begin_text = BeginText(
                request_id=request.request_id, stop=sampling.stop, prompt_text=request.prompt_text
            )
            self._outbox.send(StageName.DETOKENIZER, begin_text)
        return Sequence(
            request_id=request.request_id,
            sampling=sampling,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_len=min(len(prompt) + sampling.max_tokens, self._max_context),
            kv=kv,
            law=TokenLaw(
                self._judge.sampling_of_target(sampling),
                self._vocab_ids,
                prompt_token_ids=prompt,
                eos_token_ids=self._eos_token_ids,
                grammar=grammar,
            ),
            acceptance_seed=self._judge.acceptance_seed(sampling),
            stop_rules=self._stop_rules(sampling),
            num_top_logprobs=sampling.logprobs,
            clock=clock,
        )

    def _start(self, sequence: Sequence) -> None:
        """Read the tokens of a request that was admitted, or admitted again."""
        self._sequences[sequence.request_id] = sequence
        self._by_draft_id[sequence.draft_id] = sequence
        if self._has_draft:
            # Before the prefill, so that the draft reads the prompt at the same time.
            self._outbox.send(
                StageName.SPECULATOR,
                BeginDraft(
                    request_id=sequence.draft_id,
                    prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
                    output_token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
                    round_id=sequence.round_id,
                    sampling=sequence.sampling,
                    max_len=sequence.max_len,
                    eos_token_ids=sorted(self._eos_token_ids),
                ),
            )

    def _stop_rules(self, sampling: Sampling) -> StopRules:
        stop_text: StopText | None = None
        if sampling.stop:
            if self._text_decoder is None:
                assert self._config.model.path is not None, "setup checked it"
                self._text_decoder = TextDecoder(load_tokenizer(Path(self._config.model.path)))
            stop_text = StopText(self._text_decoder, sampling.stop, min_tokens=sampling.min_tokens)
        return StopRules(sampling, eos_token_ids=self._eos_token_ids, stop_text=stop_text)

    def _run(self, step: Step) -> None:
        """One forward, then commit what came of it."""
        self._send_held()
        start_ns = time.monotonic_ns()
        self._start_clocks(step, now_ns=start_ns)
        results = compute(step, self._runner, self._judge)
        end_ns = time.monotonic_ns()
        self._clock.add(start_ns, end_ns)
        kind = SpanKind.VERIFY if step.rounds else SpanKind.PREFILL
        sequences = step.rounds or [chunk.sequence for chunk in step.chunks]
        self._note(kind, start_ns, sequences, count=step.num_rows, end_ns=end_ns)
        self._finish(
            results,
            decided_ns=end_ns,
            num_rows=step.num_rows,
            # A forward that reads prompts says nothing about rounds.
            compute_ns=0 if step.chunks else end_ns - start_ns,
        )

    def _start_clocks(self, step: Step, *, now_ns: int) -> None:
        proposals = [s.proposal for s in step.rounds if s.proposal is not None]
        draft_spans = merge_spans(span for proposal in proposals for span in proposal.draft_spans)
        plan = next((proposal.plan for proposal in proposals if proposal.plan is not None), None)
        for chunk in step.chunks:
            if chunk.is_first and chunk.sequence.round_id > 0:  # of a request that was pre-empted
                chunk.sequence.clock.start_round(None, draft_spans=[], now_ns=now_ns, has_waited=False)
        for sequence in step.rounds:
            sequence.clock.start_round(
                sequence.proposal,
                draft_spans=draft_spans,
                now_ns=now_ns,
                has_waited=bool(proposals),
                plan=plan,
                is_resting=sequence.is_resting,
            )

    def _finish(self, results: list[RoundResult], *, decided_ns: int, num_rows: int, compute_ns: int) -> None:
        """Cut the blocks where requests end, tell the draft side of all at once, then commit.

        decided_ns, num_rows, compute_ns: of the forward; see `Outcome`.
        """
        endings = [r.sequence.stop_rules.find_ending(r.block, room=r.sequence.room) for r in results]
        for result, ending in zip(results, endings, strict=True):
            result.sequence.token_ids.extend(result.block[: ending.num_kept])
        if self._has_draft:
            going_on = [r for r, ending in zip(results, endings, strict=True) if ending.finish_reason is None]
            for number, result in enumerate(going_on, start=1):
                ends_rest = result.sequence.ends_rest(num_left=len(going_on))
                outcome = result.outcome(
                    decided_ns=decided_ns,
                    num_rows=num_rows,
                    compute_ns=compute_ns,
                    num_following=len(going_on) - number,
                    ends_rest=ends_rest,
                )
                self._outbox.send(StageName.SPECULATOR, outcome)
                if self._has_cache:
                    self._held.append((StageName.PREDICTOR, outcome))
        for result, ending in zip(results, endings, strict=True):
            self._finish_round(result, ending, decided_ns=decided_ns)
        self._runner.kv.finish_moves()

    def _finish_round(self, result: RoundResult, ending: Ending, *, decided_ns: int) -> None:
        sequence, accepted = result.sequence, result.accepted
        start_ns = time.monotonic_ns()
        block = result.block[: ending.num_kept]
        if ending.finish_reason is FinishReason.STOP and block[-1] in self._eos_token_ids:
            fault = sequence.law.fault_of_end(block[:-1])
            if fault is not None:
                self._fail_running(sequence, f"structured_outputs: the answer cannot be completed: {fault}")
                return
        num_accepted = min(len(accepted), ending.num_kept)
        if sequence.round_id == 0:
            sequence.clock.end_prefill(decided_ns)
        else:
            sequence.clock.end_round(
                num_proposed=result.num_proposed,
                num_accepted=num_accepted,
                num_committed=ending.num_kept,
                now_ns=time.monotonic_ns(),
            )
        self._watch.add(num_proposed=result.num_proposed, num_accepted=len(accepted))
        logprobs: list[TokenLogprobs] | None = None
        if sequence.num_top_logprobs is not None:
            rows = [0, *(node + 1 for node in accepted)][: ending.num_kept]
            logprobs = token_logprobs(result.logits[rows], block, num_top=sequence.num_top_logprobs)
        self._commit(sequence, block, ending, num_accepted=num_accepted, logprobs=logprobs)
        sequence.law.commit(block)
        sequence.law.forget_before(len(sequence.token_ids))
        self._note(SpanKind.COMMIT, start_ns, [sequence], count=ending.num_kept)
        sequence.next_round()
        sequence.draft_laws = None

    def _commit(
        self,
        sequence: Sequence,
        block: list[int],
        ending: Ending,
        *,
        num_accepted: int = 0,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Hand the block to the detokenizer; with a finish reason, end the request."""
        finish_reason = ending.finish_reason
        committed = Committed(
            request_id=sequence.request_id,
            round_id=sequence.round_id,
            token_ids=block,
            num_accepted=num_accepted,
            source=sequence.source(),
            num_prompt_tokens=sequence.num_prompt_tokens,
            logprobs=logprobs,
            finish_reason=finish_reason,
            metrics=None if finish_reason is None else sequence.clock.metrics(),
            stop_reason=ending.stop_reason,
            num_cut_characters=ending.num_cut_characters,
            prompt_token_ids=[]
            if finish_reason is None
            else sequence.token_ids[: sequence.num_prompt_tokens],
        )
        self._held.append((StageName.DETOKENIZER, committed))
        if finish_reason is not None or sequence.round_id == 0:
            self._send_held()
        if finish_reason is not None:
            self._release(sequence)

    def _fail_running(self, sequence: Sequence, reason: str) -> None:
        """End a request without an answer; through the detokenizer, so that nothing of it comes later."""
        failed = Committed(
            request_id=sequence.request_id,
            round_id=sequence.round_id,
            token_ids=[],
            num_accepted=0,
            source=None,
            num_prompt_tokens=sequence.num_prompt_tokens,
            failure=reason,
        )
        self._held.append((StageName.DETOKENIZER, failed))
        self._send_held()
        self._release(sequence)

    def _note(
        self,
        kind: SpanKind,
        start_ns: int,
        sequences: list[Sequence],
        *,
        count: int,
        end_ns: int | None = None,
    ) -> None:
        """Record a span for a profile, if there is one. end_ns: None is now."""
        if self._spans.is_on:
            self._spans.add(
                kind,
                start_ns,
                end_ns or time.monotonic_ns(),
                request_id=sequences[0].draft_id,
                round_id=sequences[0].round_id,
                count=count,
            )

    def _send_held(self) -> None:
        """Send what nobody waits for: its receivers share cores with the draft, which must answer first."""
        for receiver, message in self._held:
            self._outbox.send(receiver, message)
        self._held.clear()

    def _release(self, sequence: Sequence) -> None:
        """Forget a request everywhere."""
        if sequence.draft_id in self._by_draft_id:  # else it was pre-empted
            self._drop_kv(sequence)

    def _drop_kv(self, sequence: Sequence) -> None:
        """The request is admitted no longer, here and in the draft."""
        del self._sequences[sequence.request_id], self._by_draft_id[sequence.draft_id]
        self._ledger.close(sequence)
        if self._has_draft:
            end = EndDraft(request_id=sequence.draft_id)
            self._outbox.send(StageName.SPECULATOR, end)
            if self._has_cache:
                self._outbox.send(StageName.PREDICTOR, end)


def build(context: StageContext) -> TargetVerifier:
    """Factory for the stage process."""
    return TargetVerifier(msgspec.msgpack.decode(context.settings, type=RunConfig), context)
