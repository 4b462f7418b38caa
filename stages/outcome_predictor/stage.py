"""The outcome-predictor: decides which outcomes of a round are worth preparing.

It sees what the draft thinks may follow each proposed node, and what the target decided so far. It owns
the acceptance statistics. It imports no torch: it shares a core with the draft, and must be quick.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from conf.schema import RunConfig
from kernels.tree import check_tree, node_depths
from pipeline.errors import ProtocolError
from pipeline.messages import Candidates, EndDraft, Outcome, Plan, PredictorMessage, StageName
from pipeline.stage import Stage, StageContext
from pipeline.tensor_pool import TensorPool
from stages.outcome_predictor.acceptance import AcceptanceEstimate
from stages.outcome_predictor.fan_out import choose_outcomes, fan_outs

_POWER = 1.0
"""r of the power law. Fitting it online comes with the calibrated policy."""


class OutcomePredictor(Stage):
    """See the module docstring."""

    accepts = PredictorMessage

    def __init__(self, config: RunConfig, context: StageContext) -> None:
        self._policy = config.speculation.fan_out
        self._budget = config.speculation.budget
        self._outbox = context.outbox
        self._pools: Mapping[str, TensorPool] = {}
        self._acceptance: dict[str, AcceptanceEstimate] = {}
        self._overall = AcceptanceEstimate()
        """Across requests."""

    def setup(self) -> None:
        """Nothing to load."""

    def connect(self, pools: Mapping[str, TensorPool]) -> None:
        """The speculator's candidate pools."""
        self._pools = pools

    def close(self) -> None:
        """Forget the statistics."""
        self._acceptance.clear()

    def handle(self, message: PredictorMessage) -> None:
        """Plan a round, learn from an outcome, or forget a request."""
        match message:
            case Candidates():
                self._plan(message)
            case Outcome():
                self._estimate_of(message.request_id).add(message)
                self._overall.add(message)
            case EndDraft():
                self._acceptance.pop(message.request_id, None)

    def _estimate_of(self, request_id: str) -> AcceptanceEstimate:
        """A request starts from what was learned from all before it."""
        estimate = self._acceptance.get(request_id)
        if estimate is None:
            estimate = self._acceptance[request_id] = AcceptanceEstimate(self._overall.value)
        return estimate

    def _plan(self, message: Candidates) -> None:
        fault = check_tree(message.token_ids, message.parents, vocab_size=1 << 31)
        pool = self._pools.get(message.candidate_ids.pool)
        if fault is not None or pool is None:
            fault = fault or f"there is no pool {message.candidate_ids.pool!r}"
            raise ProtocolError(f"candidates for request {message.request_id}: {fault}")
        # A StaleTensor here means that the round is over; the runtime counts it, and no plan is owed.
        ids = pool.read(message.candidate_ids)
        rows = ids[: len(message.token_ids) + 1].tolist()
        children: list[set[int]] = [set() for _ in rows]
        for token, parent in zip(message.token_ids, message.parents, strict=True):
            children[parent + 1].add(token)
        candidates = [
            [token for token in row if token >= 0 and token not in proposed]
            for row, proposed in zip(rows, children, strict=True)
        ]
        depths = [0, *node_depths(message.parents)]
        estimate = self._acceptance.get(message.request_id, self._overall)
        acceptance = estimate.value
        counts = fan_outs(self._policy, depths, budget=self._budget, acceptance=acceptance, power=_POWER)
        outcomes = choose_outcomes(candidates, counts, depths, acceptance=acceptance, power=_POWER)
        self._outbox.send(
            StageName.SPECULATOR,
            Plan(
                request_id=message.request_id,
                round_id=message.round_id,
                nodes=[node for node, _ in outcomes],
                token_ids=[token for _, token in outcomes],
            ),
        )


def build(context: StageContext) -> OutcomePredictor:
    """Factory for the stage process."""
    return OutcomePredictor(msgspec.msgpack.decode(context.settings, type=RunConfig), context)
