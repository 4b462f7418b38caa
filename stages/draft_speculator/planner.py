"""How much to draft: what one more token, step or branch is worth against the time it takes.

The engine's own speed is the price of time: at R tokens a second each millisecond has to win R / 1000. So

- of a proposal's nodes the likeliest stay, as many as win most beyond R times the time of their rows;
- while the target waits, the draft takes another step as long as what it wins exceeds R times its time;
- branches are read in the steps that win most for their time, and none is begun that would keep the target
  waiting for longer than it is worth;
- where speculation as a whole is slower than plain decoding, it rests, and tries again later.

These rules maximise Theorem 7 of arXiv 2603.03251: a ratio of tokens to time is largest, R, where the most
that tokens - R * time can be is 0. All figures are measured as the engine runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.messages import PlanFigures
from stages.draft_speculator.growth import Entry, Shape
from stages.draft_speculator.measures import Measures
from stages.draft_speculator.ngram_draft import LookedUp

_FIRST_PROBE, _PROBE = 10, 6
"""Rounds of speculation before it is judged: the first time, and after a rest."""
_FIRST_REST, _LONGEST_REST = 8, 256
_REST_BELOW = 0.98
"""Of plain decoding's speed: speculation that is a little slower may only have been unlucky."""
_FEWEST_BRANCHES = 4


class Planner:
    """`plan=fixed`: everything as configured."""

    def __init__(self, shape: Shape, measures: Measures, *, min_path_prob: float, budget: int) -> None:
        """min_path_prob: of nodes that are worth reading below while the target waits. budget: branches."""
        self.measures = measures
        self._shape = shape
        self._budget = budget
        self._min_log_prob = math.log(min_path_prob) if min_path_prob > 0 else -math.inf

    def log_value(self, log_prob: float) -> float:
        """What a token of this log-probability, as the draft has it, counts for in the ranking of nodes."""
        return log_prob

    def waiting_reads(self, log_values: Sequence[float]) -> int:
        """How many of these nodes, best first, to read in a step that the target waits for; 0: no step."""
        worth = sum(value >= self._min_log_prob for value in log_values)
        return min(worth, self._shape.rows)

    def branch_reads(self, log_values: Sequence[float], *, left_ns: float) -> int:
        """The same for a step that prepares outcomes.

        left_ns: until the real one is expected, negative where it is overdue.
        """
        return min(len(log_values), self._shape.rows)

    def keep(self, entries: Sequence[Entry], *, other_rows: int) -> list[Entry]:
        """The nodes of a selection that are worth verifying; those above a kept one are kept.

        other_rows: tokens of other requests in the same forward.
        """
        return list(entries)

    def keep_looked_up(self, chain: Sequence[LookedUp]) -> list[LookedUp]:
        """The tokens of a looked-up chain that are worth verifying."""
        return list(chain)

    def pays_to_wait(self, looked_up: Sequence[LookedUp]) -> bool:
        """Whether to draft after a miss, while the target waits, with `backup=auto`.

        looked_up: what can be proposed at once instead.
        """
        measures = self.measures
        if not measures.is_known:
            return True
        chance, by_looking = 1.0, 0.0
        for token in looked_up:
            chance *= measures.look_up[token.matched].value
            by_looking += max(chance - measures.price_of_row, 0.0)
        chance, by_drafting = 1.0, 0.0
        for _ in range(self._shape.depth):
            chance *= measures.acceptance
            by_drafting += max(
                chance - measures.price * measures.step.predict_ns(1) - measures.price_of_row, 0.0
            )
        return by_drafting > by_looking

    def num_branches(self) -> int:
        """Outcomes to prepare in the coming round."""
        return self._budget

    def drafts_on(self) -> bool:
        """Whether steps are taken on a hit, too, while the target waits."""
        return False

    def rest_rounds(self) -> int:
        """Rounds to decode plainly from now on; asked once a round."""
        return 0

    def figures(self) -> PlanFigures | None:
        """What is planned by, where that is not what is configured."""
        return None


class OnlinePlanner(Planner):
    """`plan=auto`: see the module docstring. Until enough was measured it does what is configured."""

    def __init__(self, shape: Shape, measures: Measures, *, min_path_prob: float, budget: int) -> None:
        """shape and budget are the most that is ever used."""
        super().__init__(shape, measures, min_path_prob=min_path_prob, budget=budget)
        self._judge_after = _FIRST_PROBE
        self._next_rest = _FIRST_REST
        self._branch_rows = 1.0
        """Mean rows of the branch steps."""

    def log_value(self, log_prob: float) -> float:
        """The learned chance of acceptance."""
        return self.measures.calibration.log_value(log_prob)

    def drafts_on(self) -> bool:
        """Every step is weighed."""
        return self.measures.is_known

    def waiting_reads(self, log_values: Sequence[float]) -> int:
        """As many as win most beyond their price; on trial, what the root needs in any case."""
        if not self.measures.is_known:
            return super().waiting_reads(log_values)
        measures = self.measures
        if self._is_on_trial and log_values[0] == 0.0:
            return 1
        best, best_gain, won = 0, 0.0, 0.0
        for count, value in enumerate(log_values[: self._shape.rows], start=1):
            won += math.exp(value) * measures.acceptance
            lost_ns = measures.step.predict_ns(count) + count * measures.target.slope_ns
            gain = won - measures.price * lost_ns
            if gain > best_gain:
                best, best_gain = count, gain
        return best

    def branch_reads(self, log_values: Sequence[float], *, left_ns: float) -> int:
        """As many as win most for their time; what makes the target wait has its price."""
        if not self.measures.is_known:
            return super().branch_reads(log_values, left_ns=left_ns)
        measures = self.measures
        steps_ns = [measures.step.predict_ns(1 + i) for i in range(min(len(log_values), self._shape.rows))]
        late_ns = measures.delays.late_ns(steps_ns, left_ns=left_ns)
        best, best_rate, won = 0, 0.0, 0.0
        for count, (value, step, late) in enumerate(
            zip(log_values, steps_ns, late_ns, strict=False), start=1
        ):
            won += math.exp(value) * measures.acceptance
            rate = (won - measures.price * late) / step
            if rate > best_rate:
                best, best_rate = count, rate
        if best:
            self._branch_rows += 0.1 * (best - self._branch_rows)
        return best

    def keep(self, entries: Sequence[Entry], *, other_rows: int) -> list[Entry]:
        """The likeliest, as many as win most beyond the price of their rows; on trial, at least one."""
        if not self.measures.is_known:
            return super().keep(entries, other_rows=other_rows)
        measures = self.measures
        likeliest = sorted(range(len(entries)), key=lambda index: -entries[index].log_value)
        alone_ns = measures.target.predict_ns(other_rows + 1)
        count, best_gain, won = min(int(self._is_on_trial), len(entries)), 0.0, 0.0
        for rows, index in enumerate(likeliest, start=1):
            won += math.exp(entries[index].log_value)
            gain = won - measures.price * (measures.target.predict_ns(other_rows + 1 + rows) - alone_ns)
            if gain > best_gain:
                count, best_gain = rows, gain
        # A parent is at least as likely as its child and stands before it, so it is kept as well.
        kept = sorted(likeliest[:count])
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
        rows = max(round(self._branch_rows), 1)
        steps = measures.verification_ns(1 + self._shape.depth) / measures.step.predict_ns(rows) - 1
        return max(min(self._budget, round(steps * rows)), min(_FEWEST_BRANCHES, self._budget))

    def figures(self) -> PlanFigures | None:
        """The measures."""
        return self.measures.figures(num_branches=self.num_branches())

    @property
    def _is_on_trial(self) -> bool:
        return self.measures.num_speculated < self._judge_after

    def rest_rounds(self) -> int:
        """0 while speculation pays or is on trial; each rest in a row is twice as long as the one before."""
        measures = self.measures
        if self._is_on_trial or not measures.is_known:
            return 0
        if measures.speculative_rate >= _REST_BELOW * measures.plain_rate:
            self._next_rest = _FIRST_REST
            return 0
        rest, self._next_rest = self._next_rest, min(self._next_rest * 2, _LONGEST_REST)
        self._judge_after = _PROBE
        measures.start_trial()
        return rest
