"""What past outcomes say about those to come: of one request, or of all of them."""

from __future__ import annotations

from pipeline.messages import Outcome
from stages.outcome_predictor.acceptance import AcceptanceEstimate
from stages.outcome_predictor.candidates import RoundCandidates
from stages.outcome_predictor.power_law import PowerLawEstimate


class OutcomeStatistics:
    """The estimates that `geometric` uses."""

    def __init__(self, budget: int, *, before: OutcomeStatistics | None = None) -> None:
        """budget: most outcomes prepared in a round. before: what was learned so far, to start from."""
        self.acceptance = AcceptanceEstimate()
        self.power_law = PowerLawEstimate(budget)
        if before is not None:
            self.acceptance = AcceptanceEstimate(before.acceptance.value)
            self.power_law = PowerLawEstimate(budget, start=before.power_law.power)

    def add(self, outcome: Outcome, candidates: RoundCandidates | None) -> None:
        """Learn from one outcome.

        candidates: what was known of its round, if it was.
        """
        if candidates is None:
            self.acceptance.add(outcome)
            return
        if not candidates.is_filler:  # what a look-up proposed says nothing about the draft
            self.acceptance.add(outcome, was_rejected=outcome.accepted_node in candidates.parents)
        self.power_law.add(candidates.rank_of(outcome.accepted_node + 1, outcome.bonus_token))
