"""The outcome-predictor: decides which outcomes of a round are worth preparing.

It sees what the draft thinks may follow each proposed node, and what the target decided so far. It owns
the acceptance statistics. It imports no torch: it shares a core with the draft, and must be quick.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from conf.schema import FanOut, RunConfig
from kernels.tree import check_tree
from pipeline.errors import ProtocolError
from pipeline.messages import Candidates, EndDraft, Outcome, Plan, PredictorMessage, StageName
from pipeline.spans import SpanKind
from pipeline.stage import Stage, StageContext
from pipeline.tensor_pool import TensorPool
from stages.outcome_predictor.acceptance import AcceptanceEstimate
from stages.outcome_predictor.calibrated import (
    RoundCandidates,
    TauEstimate,
    likeliest_outcomes,
    path_log_probs,
)
from stages.outcome_predictor.fan_out import Nodes, choose_outcomes, fan_outs

_POWER = 1.0
"""r of the power law."""


class OutcomePredictor(Stage):
    """See the module docstring."""

    accepts = PredictorMessage

    def __init__(self, config: RunConfig, context: StageContext) -> None:
        self._policy = config.speculation.fan_out
        self._budget = config.speculation.budget
        self._outbox = context.outbox
        self._spans = context.spans
        self._pools: Mapping[str, TensorPool] = {}
        self._acceptance: dict[str, AcceptanceEstimate] = {}
        self._overall = AcceptanceEstimate()
        """Across requests."""
        self._tau = TauEstimate()
        self._rounds: dict[str, RoundCandidates] = {}
        """The last round of each request that was planned, until its outcome comes."""

    def setup(self) -> None:
        """Nothing to load."""

    def connect(self, pools: Mapping[str, TensorPool]) -> None:
        """The speculator's candidate pools."""
        self._pools = pools

    def close(self) -> None:
        """Forget the statistics."""
        self._acceptance.clear()
        self._rounds.clear()

    def handle(self, message: PredictorMessage) -> None:
        """Plan a round, learn from an outcome, or forget a request."""
        match message:
            case Candidates():
                self._plan(message)
            case Outcome():
                self._learn(message)
            case EndDraft():
                self._acceptance.pop(message.request_id, None)
                self._rounds.pop(message.request_id, None)

    def _learn(self, outcome: Outcome) -> None:
        self._estimate_of(outcome.request_id).add(outcome)
        self._overall.add(outcome)
        candidates = self._rounds.pop(outcome.request_id, None)
        # Candidates that come after their outcome teach nothing.
        if candidates is not None and candidates.round_id == outcome.round_id:
            self._tau.add(candidates, accepted_node=outcome.accepted_node, bonus_token=outcome.bonus_token)

    def _estimate_of(self, request_id: str) -> AcceptanceEstimate:
        """A request starts from what was learned from all before it."""
        estimate = self._acceptance.get(request_id)
        if estimate is None:
            estimate = self._acceptance[request_id] = AcceptanceEstimate(self._overall.value)
        return estimate

    def _plan(self, message: Candidates) -> None:
        start_ns = time.monotonic_ns()
        candidates = self._read(message)
        budget = min(message.num_branches, self._budget)
        if self._policy is FanOut.calibrated:
            outcomes = likeliest_outcomes(candidates, tau=self._tau.value, budget=budget)
            self._rounds[message.request_id] = candidates
        else:
            outcomes = self._fixed_shares(message.request_id, candidates, budget)
        if self._spans.is_on:
            self._spans.add(
                SpanKind.PLAN,
                start_ns,
                time.monotonic_ns(),
                request_id=message.request_id,
                round_id=message.round_id,
                count=len(outcomes),
            )
        self._outbox.send(
            StageName.SPECULATOR,
            Plan(
                request_id=message.request_id,
                round_id=message.round_id,
                nodes=[node for node, _, _ in outcomes],
                token_ids=[token for _, token, _ in outcomes],
                log_probs=[log_prob for _, _, log_prob in outcomes],
            ),
        )

    def _read(self, message: Candidates) -> RoundCandidates:
        """What the message says and points to. Raises `ProtocolError`, or `StaleTensor` if it is too late."""
        fault = check_tree(message.token_ids, message.parents, vocab_size=1 << 31)
        refs = (message.candidate_ids, message.candidate_log_probs)
        pools = [self._pools.get(ref.pool) for ref in refs]
        if fault is None and None in pools:
            fault = f"there is no pool {refs[pools.index(None)].pool!r}"
        if fault is not None:
            raise ProtocolError(f"candidates for request {message.request_id}: {fault}")
        # A StaleTensor here means that the round is over; the runtime counts it, and no plan is owed.
        ids, log_probs = (pool.read(ref) for pool, ref in zip(pools, refs, strict=True) if pool is not None)
        num_rows = len(message.token_ids) + 1
        rows = [
            {token: log_prob for token, log_prob in zip(tokens, values, strict=True) if token >= 0}
            for tokens, values in zip(ids[:num_rows].tolist(), log_probs[:num_rows].tolist(), strict=True)
        ]
        return RoundCandidates(
            round_id=message.round_id, token_ids=message.token_ids, parents=message.parents, rows=rows
        )

    def _fixed_shares(
        self, request_id: str, candidates: RoundCandidates, budget: int
    ) -> list[tuple[int, int, float]]:
        """`uniform` and `geometric`: every node has a share of the budget."""
        bonuses = [
            [token for token in row if token not in proposed]
            for row, proposed in zip(candidates.rows, candidates.children(), strict=True)
        ]
        reach = path_log_probs(candidates.rows, candidates.token_ids, candidates.parents)
        nodes = Nodes.tree(candidates.parents, reach)
        acceptance = self._acceptance.get(request_id, self._overall).value
        counts = fan_outs(self._policy, nodes, budget=budget, acceptance=acceptance, power=_POWER)
        return choose_outcomes(bonuses, counts, nodes, acceptance=acceptance, power=_POWER)


def build(context: StageContext) -> OutcomePredictor:
    """Factory for the stage process."""
    return OutcomePredictor(msgspec.msgpack.decode(context.settings, type=RunConfig), context)
