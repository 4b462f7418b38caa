"""A predictor under observation: where the bonus tokens stood, and what other policies would have prepared.

The watched predictor's plans go to the speculator. Shadows, predictors with other policies, see the same
messages and plan the same rounds, for comparison only: what differs between them is the policy and nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.messages import Candidates, Message, Outcome, Plan, PredictorMessage, StageName
from pipeline.stage import Stage
from pipeline.tensor_pool import TensorPool
from stages.outcome_predictor.candidates import RoundCandidates, read_candidates


class PlanBox:
    """The outbox of a shadow: keeps the last plan."""

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def send(self, receiver: StageName, message: Message) -> None:
        assert isinstance(message, Plan), "a predictor sends nothing else"
        self.plan = message

    def take(self) -> set[tuple[int, int]]:
        """The outcomes (node, bonus token) of the last plan, which is forgotten."""
        plan, self.plan = self.plan, None
        return set() if plan is None else set(zip(plan.nodes, plan.token_ids, strict=True))


class WatchedPredictor(Stage):
    """Stands in for the predictor. Requests come one by one, so a round's number says which round it is."""

    accepts = PredictorMessage

    def __init__(
        self, predictor: Stage, shadows: Mapping[str, tuple[Stage, PlanBox]], *, max_rank: int
    ) -> None:
        """shadows: by policy. max_rank: ranks beyond it are counted together."""
        self._predictor = predictor
        self._shadows = shadows
        self._max_rank = max_rank
        self._pools: Mapping[str, TensorPool] = {}
        self._rounds: dict[int, tuple[RoundCandidates, dict[str, set[tuple[int, int]]]]] = {}
        self.begin()

    def begin(self) -> None:
        """A new request: start counting anew."""
        self._rounds.clear()
        self.rank_counts = [0] * (self._max_rank + 1)
        self.planned = dict.fromkeys(self._shadows, 0)

    def setup(self) -> None:
        for stage in self._stages():
            stage.setup()

    def connect(self, pools: Mapping[str, TensorPool]) -> None:
        self._pools = pools
        for stage in self._stages():
            stage.connect(pools)

    def handle(self, message: PredictorMessage) -> None:
        if isinstance(message, Outcome):
            self._note(message)
        for stage in self._stages():
            stage.handle(message)
        if isinstance(message, Candidates):
            plans = {policy: box.take() for policy, (_, box) in self._shadows.items()}
            self._rounds[message.round_id] = (read_candidates(message, self._pools), plans)

    def close(self) -> None:
        for stage in self._stages():
            stage.close()

    def _stages(self) -> list[Stage]:
        return [self._predictor, *(shadow for shadow, _ in self._shadows.values())]

    def _note(self, outcome: Outcome) -> None:
        known = self._rounds.pop(outcome.round_id, None)
        if known is None:  # near its end a request is not prepared for
            return
        candidates, plans = known
        rank = candidates.rank_of(outcome.accepted_node + 1, outcome.bonus_token)
        self.rank_counts[self._max_rank if rank is None else min(rank - 1, self._max_rank)] += 1
        for policy, plan in plans.items():
            self.planned[policy] += (outcome.accepted_node, outcome.bonus_token) in plan
