"""How much to draft: what one more token, step or branch is worth against the time it takes.

The engine's own speed is the price of time: at R tokens a second each millisecond has to win R / 1000. So

- of a proposal's nodes the likeliest stay, as many as win most beyond R times the time of their rows;
- while the target waits, the draft takes another step as long as what it wins exceeds R times its time;
- branches are read in the steps that win most for their time, and none is begun that would keep the target
  waiting for longer than it is worth;
- whether to speculate at all, and whether outcomes are prepared, is decided by trying it (`trials`).

A forward and a draft step serve all requests of a batch, and whoever makes the target wait makes all wait: so
time is priced at the speed of all of them together, and steps are weighed for all that share them.

These rules maximise Theorem 7 of arXiv 2603.03251: a ratio of tokens to time is largest, R, where the most
that tokens - R * time can be is 0. All figures are measured as the engine runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

from pipeline.messages import PlanFigures
from stages.draft_speculator.growth import Entry, Shape
from stages.draft_speculator.measures import Measures, Way
from stages.draft_speculator.ngram_draft import LookedUp
from stages.draft_speculator.trials import Trials

_FEWEST_BRANCHES = 4
_MOST_TREES = 4
"""Most requests for which trees are drafted while the target waits. To choose the nodes of many takes longer,
and their rows cost more, than is won beyond chains."""
_VALUE = itemgetter(0)


class Planner:
    """`plan=fixed`: everything as configured."""

    def __init__(self, shape: Shape, measures: Measures, *, min_path_prob: float, budget: int) -> None:
        """min_path_prob: of nodes that are worth reading below while the target waits. budget: branches."""
        self.measures = measures
        self._shape = shape
        self._budget = budget
        self._min_log_prob = math.log(min_path_prob) if min_path_prob > 0 else -math.inf

    @property
    def shape(self) -> Shape:
        """Of the proposals of the coming round."""
        return self._shape

    def log_value(self, log_prob: float) -> float:
        """What a token of this log-probability, as the draft has it, counts for in the ranking of nodes."""
        return log_prob

    def waiting_reads(self, log_values: Sequence[Sequence[float]]) -> list[int]:
        """How many nodes of each request to read in a step that the target waits for; all 0: no step.

        log_values: of the nodes that each request could read, best first.
        """
        worth = [sum(value >= self._min_log_prob for value in values) for values in log_values]
        return [min(count, self._shape.rows) for count in worth]

    def branch_reads(self, log_values: Sequence[Sequence[float]], *, left_ns: float) -> list[int]:
        """The same for a step that prepares outcomes.

        left_ns: until the real ones are expected, negative where they are overdue.
        """
        return [min(len(values), self._shape.rows) for values in log_values]

    def keep(self, entries: Sequence[Entry], *, other_rows: int) -> list[Entry]:
        """The nodes of a selection that are worth verifying; those above a kept one are kept.

        other_rows: tokens of other requests in the same forward.
        """
        return list(entries)

    def keep_looked_up(self, chain: Sequence[LookedUp]) -> list[LookedUp]:
        """The tokens of a looked-up chain that are worth verifying."""
        return list(chain)

    def pays_to_wait(self, looked_up: Sequence[Sequence[LookedUp]]) -> bool:
        """Whether to draft after misses, while the target waits, with `backup=auto`.

        looked_up: what can be proposed at once instead, for each request that missed.
        """
        measures = self.measures
        if not measures.is_known:
            return True
        row_price, by_looking = measures.price_of_row, 0.0
        for chain in looked_up:
            chance = 1.0
            for token in chain:
                chance *= measures.look_up[token.matched].value
                by_looking += max(chance - row_price, 0.0)
        num_missed = len(looked_up)
        step_price = measures.price * measures.step.predict_ns(num_missed)
        chance, by_drafting = 1.0, 0.0
        for _ in range(self._shape.depth):
            chance *= measures.acceptance
            by_drafting += max(num_missed * (chance - row_price) - step_price, 0.0)
        return by_drafting > by_looking

    def num_branches(self) -> int:
        """Outcomes to prepare in the coming round."""
        return self._budget

    def prepares(self) -> bool:
        """Whether outcomes of the coming round are prepared at all."""
        return self._budget > 0

    def drafts_on(self) -> bool:
        """Whether steps are taken on a hit, too, while the target waits."""
        return False

    @property
    def rest_left(self) -> int:
        """Rounds still to come of the last rest."""
        return 0

    def rest_rounds(self) -> int:
        """Rounds that the whole batch decodes plainly from now on; asked once a round while nobody rests."""
        return 0

    def goes_on_resting(self, rounds: int) -> None:
        """Of the rest that `rest_rounds` began so many rounds are left. Requests end before it does."""

    def figures(self) -> PlanFigures | None:
        """What is planned by, where that is not what is configured; told to one request of a round."""
        return None


class OnlinePlanner(Planner):
    """`plan=auto`: see the module docstring. Until enough was measured it does what is configured."""

    def __init__(self, shape: Shape, measures: Measures, *, min_path_prob: float, budget: int) -> None:
        """shape and budget are the most that is ever used."""
        super().__init__(shape, measures, min_path_prob=min_path_prob, budget=budget)
        self._trials = Trials(measures, depth=shape.depth, can_prepare=budget > 0)
        self._chain = shape.as_chain()
        self._branch_rows = 1.0
        """Mean rows of the branch steps, a request."""
        self._has_told = False
        """Whether `figures` told its figures in this round."""

    @property
    def shape(self) -> Shape:
        """Chains instead of best-first trees where many requests wait for them."""
        is_dear = self.measures.num_active > _MOST_TREES and not self.prepares()
        return self._chain if is_dear and self._shape.widths is None else self._shape

    def log_value(self, log_prob: float) -> float:
        """The learned chance of acceptance."""
        return self.measures.calibration.log_value(log_prob)

    def drafts_on(self) -> bool:
        """Every step is weighed."""
        return self.measures.is_known

    def waiting_reads(self, log_values: Sequence[Sequence[float]]) -> list[int]:
        """As many as win most beyond their price; on trial, what the roots need in any case."""
        if not self.measures.is_known:
            return super().waiting_reads(log_values)
        measures = self.measures
        pool = _pool(log_values, most=self._shape.rows)
        acceptance, price, row_ns = measures.acceptance, measures.price, measures.target.slope_ns
        best, best_gain, won = 0, 0.0, 0.0
        times_ns = measures.step.predict_up_to(len(pool))
        for count, ((value, _), step_ns) in enumerate(zip(pool, times_ns, strict=True), start=1):
            won += math.exp(value) * acceptance
            gain = won - price * (step_ns + count * row_ns)
            if gain > best_gain:
                best, best_gain = count, gain
        counts = _count_each(pool[:best], len(log_values))
        if not self._trials.is_on_trial:
            return counts
        return [
            max(count, int(bool(values) and values[0] == 0.0))
            for count, values in zip(counts, log_values, strict=True)
        ]

    def branch_reads(self, log_values: Sequence[Sequence[float]], *, left_ns: float) -> list[int]:
        """As many as win most for their time; what makes the target wait has its price."""
        if not self.measures.is_known:
            return super().branch_reads(log_values, left_ns=left_ns)
        measures = self.measures
        pool = _pool(log_values, most=self._shape.rows)
        acceptance, price = measures.acceptance, measures.price
        best, best_rate, won = 0, 0.0, 0.0
        times_ns = measures.step.predict_up_to(len(pool))
        late_ns = measures.delays.late_ns(times_ns, left_ns=left_ns)
        for count, ((value, _), step, late) in enumerate(zip(pool, times_ns, late_ns, strict=True), start=1):
            won += math.exp(value) * acceptance
            rate = (won - price * late) / step
            if rate > best_rate:
                best, best_rate = count, rate
        if best:
            self._branch_rows += 0.1 * (best / measures.num_active - self._branch_rows)
        return _count_each(pool[:best], len(log_values))

    def keep(self, entries: Sequence[Entry], *, other_rows: int) -> list[Entry]:
        """The likeliest, as many as win most beyond the price of their rows; on trial, at least one."""
        if not self.measures.is_known:
            return super().keep(entries, other_rows=other_rows)
        measures = self.measures
        price = measures.price
        values = [entry.log_value for entry in entries]
        likeliest = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        times_ns = measures.target.predict_up_to(len(values) + 1, beside=other_rows)
        count, best_gain, won = min(int(self._trials.is_on_trial), len(values)), 0.0, 0.0
        for rows, index in enumerate(likeliest, start=1):
            won += math.exp(values[index])
            gain = won - price * (times_ns[rows] - times_ns[0])
            if gain > best_gain:
                count, best_gain = rows, gain
        # A parent is at least as likely as its child and stands before it, so it is kept as well.
        kept = sorted(likeliest[:count])
        if not kept or kept[-1] == count - 1:  # the first ones, as of a chain
            return list(entries[:count])
        new_index = {old: new for new, old in enumerate(kept)}
        return [entries[old]._replace(parent=new_index.get(entries[old].parent, -1)) for old in kept]

    def keep_looked_up(self, chain: Sequence[LookedUp]) -> list[LookedUp]:
        """Those whose chance exceeds the price of a row."""
        if not self.measures.is_known:
            return super().keep_looked_up(chain)
        kept: list[LookedUp] = []
        chance = 1.0
        for token in chain:
            chance *= self.measures.look_up[token.matched].value
            if chance <= self.measures.price_of_row:
                break
            kept.append(token)
        return kept

    def num_branches(self) -> int:
        """No more than can be read while the target verifies, a step being taken by the proposal itself."""
        measures = self.measures
        if not measures.is_known:
            return super().num_branches()
        batch = measures.num_active
        rows = max(round(self._branch_rows), 1)
        verification_ns = measures.verification_ns(batch * (1 + self._shape.depth))
        steps = verification_ns / measures.step.predict_ns(batch * rows) - 1
        return max(min(self._budget, round(steps * rows)), min(_FEWEST_BRANCHES, self._budget))

    def prepares(self) -> bool:
        """As was found to be faster."""
        return self._trials.way is Way.PREPARED

    @property
    def rest_left(self) -> int:
        """As `goes_on_resting` had it last."""
        return self._trials.rest_left

    def rest_rounds(self) -> int:
        """0 where speculation pays or is on trial."""
        self._has_told = False
        return self._trials.rest_rounds()

    def goes_on_resting(self, rounds: int) -> None:
        """What is left when the last request ends is for the next."""
        self._has_told = False
        self._trials.goes_on_resting(rounds)

    def figures(self) -> PlanFigures | None:
        """The measures, and None from the second time in a round."""
        if self._has_told:
            return None
        self._has_told = True
        num_branches = self.num_branches() if self.prepares() else 0
        return self.measures.figures(way=self._trials.way, num_branches=num_branches)


def _pool(log_values: Sequence[Sequence[float]], *, most: int) -> list[tuple[float, int]]:
    """The nodes of all requests, best first, with the request of each; of each request at most `most`."""
    pool = [(value, request) for request, values in enumerate(log_values) for value in values[:most]]
    pool.sort(key=_VALUE, reverse=True)
    return pool


def _count_each(pool: Sequence[tuple[float, int]], num_requests: int) -> list[int]:
    counts = [0] * num_requests
    for _, request in pool:
        counts[request] += 1
    return counts
