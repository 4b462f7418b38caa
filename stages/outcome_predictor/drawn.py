"""Outcome probabilities of a round whose proposal was drawn by chance: the rejection rule.

What the target puts after rejected children does not depend on the noise of the draft, so

    P(outcome) = P(path to the node accepted) * P(all its children rejected) * r(bonus token | node)

with r the law of what is left of the target's law, for which the draft's own law without the children stands
in. How likely a child is accepted is learned online, by what the draft gave it and by its turn among its
siblings. Saguaro sampling with a small C leaves the residual to the F likeliest tokens.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conf.proposal_size import parents_of_widths
from conf.saguaro import active_saguaro_c
from conf.schema import FanOut, SpeculationConfig
from kernels.tree import node_depths
from pipeline.messages import Outcome
from stages.outcome_predictor.bonus_law import BonusLaw
from stages.outcome_predictor.calibrated import best_of
from stages.outcome_predictor.candidates import RoundCandidates
from stages.outcome_predictor.fan_out import Nodes, fan_outs

_NUM_BINS = 8
"""Of a child's probability, each half of the one before: (1/2, 1], (1/4, 1/2], ..."""
_DECAY = 0.995
"""Per try in the same bin."""
_PRIOR_TRIES = 4.0
_UNKNOWN = math.log(1e-4)
"""Log-probability of a token that the draft did not name."""
_LEAST = 1e-4
"""No outcome is held to be impossible."""
_ROUNDS_KEPT = 2
"""A request: an outcome may come after the candidates of the round that follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saguaro:
    """How the children of a round were drawn."""

    c: float
    fan_outs: list[int]
    """F at each depth."""


class TryEstimate:
    """Probability that a child is accepted when it is tried."""

    def __init__(self, prior: float = 0.6) -> None:
        """prior: before anything was seen."""
        self._prior = prior
        self._accepted = [[0.0] * _NUM_BINS for _ in range(2)]
        self._tried = [[0.0] * _NUM_BINS for _ in range(2)]

    def value(self, log_prob: float, turn: int) -> float:
        """log_prob: what the draft gave the child. turn: 0 for the first one of its siblings."""
        row, column = min(turn, 1), _bin(log_prob)
        accepted = self._accepted[row][column] + self._prior * _PRIOR_TRIES
        value = accepted / (self._tried[row][column] + _PRIOR_TRIES)
        return min(max(value, _LEAST), 1 - _LEAST)

    def add(self, log_prob: float, turn: int, *, was_accepted: bool) -> None:
        """Learn from one try."""
        row, column = min(turn, 1), _bin(log_prob)
        self._accepted[row][column] = self._accepted[row][column] * _DECAY + was_accepted
        self._tried[row][column] = self._tried[row][column] * _DECAY + 1


def _bin(log_prob: float) -> int:
    return min(int(-log_prob / math.log(2)), _NUM_BINS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    candidates: RoundCandidates
    saguaro: Saguaro | None


class DrawnOutcomes:
    """Plans rounds that were drawn by chance, learns from them, and says how the next is to be drawn."""

    def __init__(self, speculation: SpeculationConfig, *, max_requests: int = 1) -> None:
        self._policy = speculation.fan_out
        self._c = active_saguaro_c(speculation)
        parents = parents_of_widths(speculation.tree.widths or [1] * speculation.depth)
        self._full = Nodes.tree(parents, [0.0] * (len(parents) + 1))
        self._tries = TryEstimate()
        self._after_leaf = BonusLaw()
        self._after_rejection = BonusLaw(saguaro_c=self._c)
        self._announced: dict[str, tuple[float, Saguaro]] = {}
        """Of each request, how its next proposal is drawn, and the acceptance that this follows from."""
        self._most_kept = _ROUNDS_KEPT * max_requests
        self._rounds: deque[tuple[str, _Round]] = deque(maxlen=self._most_kept)
        """The last rounds that began. Bounded, because candidates may come after the end of their request."""

    def announce(self, request_id: str, *, budget: int, acceptance: float, power: float) -> list[int]:
        """F at each depth of the request's next proposal; empty without Saguaro sampling.

        budget: outcomes that are prepared now, which is the best guess for the next round.
        A policy that shares the budget by depth uses these shares in the next round; `calibrated`, which
        knows its shares only once the tokens are drawn, has those of `geometric`.
        """
        if self._c is None:
            return []
        policy = FanOut.geometric if self._policy is FanOut.calibrated else self._policy
        counts = fan_outs(policy, self._full, budget=budget, acceptance=acceptance, power=power)
        by_depth = [0] * (max(self._full.depths) + 1)
        for count, depth in zip(counts, self._full.depths, strict=True):
            by_depth[depth] = max(by_depth[depth], count)
        self._announced.pop(request_id, None)
        self._announced[request_id] = (acceptance, Saguaro(c=self._c, fan_outs=by_depth))
        if len(self._announced) > self._most_kept:  # of a request that ended before its last candidates came
            del self._announced[next(iter(self._announced))]
        return by_depth

    def announced_acceptance(self, request_id: str, default: float) -> float:
        """The acceptance from which the shares of the present round follow."""
        announced = self._announced.get(request_id)
        return default if announced is None else announced[0]

    def reach(self, candidates: RoundCandidates) -> list[float]:
        """Log-probability that the path to the root and to each node is accepted; 0 for the root."""
        return self._walk(candidates)[0]

    def begin(self, request_id: str, candidates: RoundCandidates) -> None:
        """A round that was drawn: its outcome will be learned from."""
        announced = self._announced.get(request_id)
        saguaro = None if announced is None else announced[1]
        self._rounds.append((request_id, _Round(candidates=candidates, saguaro=saguaro)))

    def likeliest(self, request_id: str, *, budget: int) -> list[tuple[int, int, float]]:
        """The likeliest outcomes (node, bonus token, log-probability) of a round that began, best first.

        budget: how many; the root is node -1.
        """
        this = next(one for known, one in reversed(self._rounds) if known == request_id)
        weights, is_tail, has_children = _leftovers(this)
        log_probs = np.where(
            has_children[:, None],
            self._after_rejection.log_probs(weights, is_tail),
            self._after_leaf.log_probs(weights, is_tail),
        )
        scores = log_probs + np.array(self._walk(this.candidates)[1])[:, None]
        return best_of(scores, this.candidates.ids, budget)

    def learn(self, outcome: Outcome) -> bool:
        """Learn from every try on the way, and from the bonus token. False where its round was not drawn."""
        key = (outcome.request_id, outcome.round_id)
        this = next((one for known, one in self._rounds if (known, one.candidates.round_id) == key), None)
        # A round that was planned too late, or not drawn, teaches nothing here.
        if this is None:
            return False
        candidates = this.candidates
        below = _children(candidates)
        node, accepted_child = outcome.accepted_node, -1
        while True:
            for turn, child in enumerate(below[node + 1]):
                log_prob = _log_prob(candidates, child)
                self._tries.add(log_prob, turn, was_accepted=child == accepted_child)
                if child == accepted_child:
                    break
            if node < 0:
                break
            node, accepted_child = candidates.parents[node], node
        row = outcome.accepted_node + 1
        column = candidates.column_of(row, outcome.bonus_token)
        if column is not None:
            weights, is_tail, has_children = _leftovers(this)
            law = self._after_rejection if has_children[row] else self._after_leaf
            law.add(weights[row], is_tail[row], column)
        return True

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._announced.pop(request_id, None)

    def _walk(self, candidates: RoundCandidates) -> tuple[list[float], list[float]]:
        """Log-probabilities of the root and each node: of being accepted, and of being the last accepted."""
        reach = [0.0] * (len(candidates.token_ids) + 1)
        stops = list(reach)
        for row, children in enumerate(_children(candidates)):
            left = reach[row]
            for turn, child in enumerate(children):
                log_prob = _log_prob(candidates, child)
                accepts = self._tries.value(log_prob, turn)
                reach[child + 1] = left + math.log(accepts)
                left += math.log(1 - accepts)
            stops[row] = left
        return reach, stops


def _children(candidates: RoundCandidates) -> list[list[int]]:
    """Nodes proposed below each row, in their order."""
    below: list[list[int]] = [[] for _ in range(len(candidates.token_ids) + 1)]
    for node, parent in enumerate(candidates.parents):
        below[parent + 1].append(node)
    return below


def _log_prob(candidates: RoundCandidates, node: int) -> float:
    """What the draft gave a node's token."""
    column = candidates.columns[node]
    return _UNKNOWN if column < 0 else float(candidates.log_probs[candidates.parents[node] + 1, column])


def _leftovers(this: _Round) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """What may follow each row's node if all its children are rejected.

    Returns log weights [rows, width], what of it is behind the F of Saguaro sampling [rows, width], and which
    rows have children at all [rows].
    """
    candidates = this.candidates
    weights = candidates.log_probs.copy()
    weights[candidates.is_child | (candidates.ids < 0)] = -np.inf
    has_children = np.zeros(len(weights), dtype=np.bool_)
    has_children[np.asarray(candidates.parents, dtype=np.int64) + 1] = True
    is_tail = np.zeros(weights.shape, dtype=np.bool_)
    if this.saguaro is not None:
        fan_outs = np.asarray(this.saguaro.fan_outs)
        depths = np.asarray([0, *node_depths(candidates.parents)])
        counts = fan_outs[np.minimum(depths, len(fan_outs) - 1)]
        is_tail = (np.arange(weights.shape[1]) >= counts[:, None]) & has_children[:, None]
    return weights, is_tail, has_children
