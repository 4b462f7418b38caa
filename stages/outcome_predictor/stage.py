"""The outcome-predictor: decides which outcomes of a round are worth preparing.

It sees what the draft thinks may follow each proposed node, and what the target decided so far. It owns
the acceptance statistics. It imports no torch: it shares a core with the draft, and must be quick.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import msgspec

from conf.schema import FanOut, RunConfig
from pipeline.messages import Candidates, EndDraft, Outcome, Plan, PredictorMessage, StageName
from pipeline.spans import SpanKind
from pipeline.stage import Stage, StageContext
from pipeline.tensor_pool import TensorPool
from stages.outcome_predictor.calibrated import TauEstimate, likeliest_outcomes, path_log_probs
from stages.outcome_predictor.candidates import RoundCandidates, read_candidates
from stages.outcome_predictor.drawn import DrawnOutcomes
from stages.outcome_predictor.fan_out import Nodes, choose_outcomes, fan_outs
from stages.outcome_predictor.statistics import OutcomeStatistics

_ROUNDS_KEPT = 2
"""A request: an outcome may come after the candidates of the round that follows it."""


class OutcomePredictor(Stage):
    """See the module docstring."""

    accepts = PredictorMessage

    def __init__(self, config: RunConfig, context: StageContext) -> None:
        self._policy = config.speculation.fan_out
        self._budget = config.speculation.budget
        self._outbox = context.outbox
        self._spans = context.spans
        self._pools: Mapping[str, TensorPool] = {}
        self._overall = OutcomeStatistics(self._budget)
        """Across requests."""
        self._tau = TauEstimate()
        """Across requests, too: it belongs to the pair of models more than to a text."""
        self._drawn = DrawnOutcomes(config.speculation, max_requests=config.max_requests)
        self._statistics: dict[str, OutcomeStatistics] = {}
        """Of each request."""
        self._rounds: deque[tuple[str, RoundCandidates]] = deque(maxlen=_ROUNDS_KEPT * config.max_requests)
        """The last rounds that were planned, for what their outcomes teach."""

    def setup(self) -> None:
        """Nothing to load."""

    def connect(self, pools: Mapping[str, TensorPool]) -> None:
        """The speculator's candidate pools."""
        self._pools = pools

    def close(self) -> None:
        """Forget the statistics."""
        self._statistics.clear()
        self._rounds.clear()

    def handle(self, message: PredictorMessage) -> None:
        """Plan a round, learn from an outcome, or forget a request."""
        match message:
            case Candidates():
                self._plan(message)
            case Outcome():
                self._learn(message)
            case EndDraft():
                self._statistics.pop(message.request_id, None)
                self._drawn.forget(message.request_id)

    def _learn(self, outcome: Outcome) -> None:
        candidates = self._candidates_of(outcome)
        statistics = self._statistics.get(outcome.request_id)
        if statistics is None:  # a request starts from what was learned from all before it
            statistics = OutcomeStatistics(self._budget, before=self._overall)
            self._statistics[outcome.request_id] = statistics
        statistics.add(outcome, candidates)
        self._overall.add(outcome, candidates)
        if candidates is not None and not self._drawn.learn(outcome):
            self._tau.add(candidates, accepted_node=outcome.accepted_node, bonus_token=outcome.bonus_token)

    def _candidates_of(self, outcome: Outcome) -> RoundCandidates | None:
        """What was known of the outcome's round; None if that comes too late, or names no such node."""
        for request_id, known in self._rounds:
            if (request_id, known.round_id) == (outcome.request_id, outcome.round_id):
                return known if -1 <= outcome.accepted_node < len(known.parents) else None
        return None

    def _plan(self, message: Candidates) -> None:
        start_ns = time.monotonic_ns()
        candidates = read_candidates(message, self._pools)
        self._rounds.append((message.request_id, candidates))
        statistics = self._statistics.get(message.request_id, self._overall)
        budget = min(message.num_branches, self._budget)
        acceptance = self._drawn.announced_acceptance(message.request_id, statistics.acceptance.value)
        if message.is_drawn:
            self._drawn.begin(message.request_id, candidates)
        if self._policy is not FanOut.calibrated:
            reach = self._drawn.reach(candidates) if message.is_drawn else None
            outcomes = self._fixed_shares(candidates, statistics, budget, acceptance=acceptance, reach=reach)
        elif message.is_drawn:
            outcomes = self._drawn.likeliest(message.request_id, budget=budget)
        else:
            outcomes = likeliest_outcomes(candidates, tau=self._tau.value, budget=budget)
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
                next_fan_outs=self._drawn.announce(
                    message.request_id,
                    budget=budget,
                    acceptance=statistics.acceptance.value,
                    power=statistics.power_law.power,
                ),
            ),
        )

    def _fixed_shares(
        self,
        candidates: RoundCandidates,
        statistics: OutcomeStatistics,
        budget: int,
        *,
        acceptance: float,
        reach: list[float] | None,
    ) -> list[tuple[int, int, float]]:
        """`uniform` and `geometric`: every node has a share of the budget."""
        if reach is None:
            reach = path_log_probs(candidates.log_probs, candidates.parents, candidates.columns)
        nodes = Nodes.tree(candidates.parents, reach)
        power = statistics.power_law.power
        counts = fan_outs(
            self._policy,
            nodes,
            budget=budget,
            acceptance=acceptance,
            power=power,
            is_filler=candidates.is_filler,
        )
        return choose_outcomes(candidates.bonuses(), counts, nodes, acceptance=acceptance, power=power)


def build(context: StageContext) -> OutcomePredictor:
    """Factory for the stage process."""
    return OutcomePredictor(msgspec.msgpack.decode(context.settings, type=RunConfig), context)
