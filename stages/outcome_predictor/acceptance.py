"""The acceptance rate, measured online from outcomes."""

from __future__ import annotations

from pipeline.messages import Outcome

_DECAY = 0.98
"""Per round: the estimate follows the last fifty rounds or so, as text moves between easy and hard."""
_PRIOR_TRIALS = 5.0
"""How firmly a new estimate holds on to where it started."""


class AcceptanceEstimate:
    """Probability that one draft token is accepted, given that those before it were."""

    def __init__(self, start: float = 0.6) -> None:
        """start: the estimate before the first outcome."""
        self._start = start
        self._accepted = 0.0
        self._trials = 0.0

    def add(self, outcome: Outcome, *, was_rejected: bool | None = None) -> None:
        """Count one round: every accepted token is a success, the first rejection a failure.

        was_rejected: whether something was proposed below the accepted node. None takes the proposal for a
            chain.
        """
        if outcome.num_proposed == 0:
            return
        if was_rejected is None:
            was_rejected = outcome.num_accepted < outcome.num_proposed
        self._accepted = self._accepted * _DECAY + outcome.num_accepted
        self._trials = self._trials * _DECAY + outcome.num_accepted + was_rejected

    @property
    def value(self) -> float:
        """Between 0 and 1, never either."""
        return (self._accepted + self._start * _PRIOR_TRIALS) / (self._trials + _PRIOR_TRIALS)
