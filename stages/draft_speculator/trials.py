"""Whether to speculate, and whether outcomes are prepared: decided by trying it, for batches of each size.

Where speculation is slower than plain decoding it rests, and tries again later; where it pays, it rests now
and then for as long as it takes to measure plain decoding anew. A few requests begin with prepared outcomes,
and drafting after the outcome is tried where it promises more than these give. Many requests can keep the
draft so busy that what it prepares comes too late: they begin by drafting after the outcome, and preparing is
tried. The faster way is the usual one from then on. Nothing is tried while prompts of others are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stages.draft_speculator.measures import Measures, Way

_FIRST_PROBE, _PROBE = 10, 6
"""Rounds of one request, before speculation is judged: the first time, and after a rest."""
_FIRST_REST, _LONGEST_REST = 8, 256
_REST_BELOW = 0.98
"""Of plain decoding's speed: what is a little slower is not worth a change."""
_DOUBT = 0.15
"""Standard deviation of the speed in a round of one request: over the root of their number, a mean's."""
_REMEMBERED = 12.0
"""Rounds of one request, at most, that earlier trials count for in the next: the text may have changed."""
_HOPELESS = 0.85
"""Of plain decoding's speed: the next rest is four times as long, and not only twice."""
_SETTLED = 32
"""Rounds of speculation after which it is held to pay; a look-up or two may have been lucky before."""
_COMPARE_AFTER, _COMPARE_LATER = 64, 20.0
"""Rounds of speculation before plain decoding is measured anew, and how much later for each time as fast."""
_TRY_ROUNDS = 16
"""Rounds of one request, for which the other way to speculate is tried."""
_FEWEST_ROUNDS = 4
"""Of a batch, whose requests together tell as much in fewer rounds."""
_TRY_AGAIN_AFTER, _LONGEST_UNTRIED = 64, 1024
"""Rounds before it is, after a change; twice as many after each time in a row it was slower."""
_PREPARE_FIRST = 4
"""Most requests of a batch that begins with preparing outcomes. In a larger one a draft seldom gets as far
while the target verifies as it does when it is waited for; there preparing is what is tried later."""


@dataclass(slots=True)
class _Trial:
    """How it goes with one class of batch sizes. All counts are of rounds.

    judge_after: with proposals, before speculation is judged.
    next_rest: how long it rests if it does not pay; rest_left: of a rest, still to come.
    compared_at: with proposals, when plain decoding was last measured for comparison.
    way: how it speculates; is_trying: only to see how fast that is.
    gain_before: over plain decoding's speed, in the trials before; weight_before: rounds that it counts for.
    num_in_way: since that was last decided, rests of DRAFTED included; untried: until the other is tried.
    """

    way: Way
    judge_after: int
    next_rest: int = _FIRST_REST
    rest_left: int = 0
    compared_at: int = 0
    is_trying: bool = False
    gain_before: float = 0.0
    weight_before: float = 0.0
    num_in_way: int = 0
    untried: int = 0

    def take(self, way: Way, *, is_trying: bool) -> None:
        """Speculate in this way from now on."""
        self.way, self.is_trying, self.num_in_way = way, is_trying, 0
        self.weight_before = 0.0

    def recall(self, gain: float, weight: float) -> tuple[float, float]:
        """The mean of what is seen now and what was seen in the trials before, and its weight.

        Where there is no doubt that it is faster now, what was seen before is forgotten.
        """
        if gain > _REST_BELOW + 3 * _DOUBT / math.sqrt(weight):
            self.weight_before = 0.0
        total = weight + self.weight_before
        return (gain * weight + self.gain_before * self.weight_before) / total, total


class Trials:
    """Owned by the planner, which asks once a round of the batch."""

    def __init__(self, measures: Measures, *, depth: int, can_prepare: bool) -> None:
        """depth: of the proposals, at most."""
        self._measures = measures
        self._depth = depth
        self._can_prepare = can_prepare
        self._of_class: dict[int, _Trial] = {}
        self._resting = self._new()
        """Of the batch that was asked about last."""

    def _new(self) -> _Trial:
        judge_after = self._rounds(_FIRST_PROBE)
        if self._can_prepare and self._measures.num_active <= _PREPARE_FIRST:
            return _Trial(Way.PREPARED, judge_after)
        return _Trial(Way.DRAFTED, judge_after, untried=_TRY_AGAIN_AFTER)

    def _rounds(self, of_one: int) -> int:
        """Of the batch, which tell as much as so many of one request."""
        return max(math.ceil(of_one / self._measures.num_active), min(of_one, _FEWEST_ROUNDS))

    @property
    def _trial(self) -> _Trial:
        trial = self._of_class.get(self._measures.batch_class)
        if trial is None:
            trial = self._of_class[self._measures.batch_class] = self._new()
        return trial

    @property
    def way(self) -> Way:
        """How to speculate in the coming round, where it does not rest."""
        return self._trial.way

    @property
    def is_on_trial(self) -> bool:
        """Whether proposals are made whatever they are worth, so that their speed can be measured."""
        trial = self._trial
        return not trial.is_trying and self._num_speculated < trial.judge_after

    @property
    def _num_speculated(self) -> int:
        return self._measures.of_way(self.way).num_rounds

    @property
    def _is_crowded(self) -> bool:
        """Whether prompts are read beside a batch: nothing can be measured, and whoever waits for a first
        token waits for all rows."""
        return self._measures.reads_prompts and self._measures.num_active > 1

    def rest_rounds(self) -> int:
        """0 while speculation pays or is on trial; each rest in a row is twice as long as the one before.

        Plain decoding is measured in rests only, and a shared machine or a longer context makes old figures
        wrong: where speculation pays, a short rest renews them, the more seldom the more it pays.
        """
        trial = self._trial
        if trial.rest_left == 0:
            trial.rest_left = self._judge(trial)
        self._resting = trial
        return trial.rest_left

    @property
    def rest_left(self) -> int:
        """Rounds that a batch as the last one rests on, or will when it comes again."""
        return self._resting.rest_left

    def goes_on_resting(self, rounds: int) -> None:
        """Of the rest that `rest_rounds` began so many rounds are left. Requests end before it does."""
        self._resting.rest_left = rounds

    def _judge(self, trial: _Trial) -> int:
        """How long to rest now."""
        measures = self._measures
        if self._is_in_vain(trial):
            return self._rest(trial, is_hopeless=True)
        if self._is_crowded and self.is_on_trial:
            return 1
        if not measures.is_known:
            return 0
        if self._can_prepare:
            self._choose_way(trial)
        if trial.is_trying or self.is_on_trial:
            return 0
        speculative = measures.of_way(trial.way)
        gain, weight = trial.recall(
            speculative.value / measures.plain_rate, speculative.weight * measures.num_active
        )
        if gain < _REST_BELOW - _DOUBT / math.sqrt(weight):
            trial.gain_before, trial.weight_before = gain, min(weight, _REMEMBERED)
            return self._rest(trial, is_hopeless=gain < _HOPELESS)
        num_speculated = speculative.num_rounds
        if num_speculated >= _SETTLED and gain >= _REST_BELOW:
            trial.next_rest, trial.weight_before = _FIRST_REST, 0.0
        if num_speculated - trial.compared_at < _COMPARE_AFTER * (1 + _COMPARE_LATER * max(gain - 1, 0.0)):
            return 0
        trial.compared_at = num_speculated
        measures.measure_anew(Way.PLAIN)
        return _FIRST_REST

    def _rest(self, trial: _Trial, *, is_hopeless: bool) -> int:
        """How long, for it does not pay."""
        rest = trial.next_rest
        trial.next_rest = min(rest * (4 if is_hopeless else 2), _LONGEST_REST)
        trial.judge_after, trial.compared_at = self._rounds(_PROBE), 0
        if trial.way is Way.DRAFTED:  # else preparing, which hides the draft's time, would hardly be tried
            trial.num_in_way += rest
        self._measures.measure_anew(Way.PLAIN)
        self._measures.measure_anew(trial.way)
        return rest

    def _is_in_vain(self, trial: _Trial) -> bool:
        """Whether a trial that would begin now cannot show a gain.

        Asked for batches only: a single request loses little, and may gain by tokens that are looked up.
        The figures may be old or of other batches: from the longest rest on it is tried all the same.
        """
        measures = self._measures
        is_begun = self._num_speculated > 0 or trial.next_rest == _LONGEST_REST
        if is_begun or measures.num_active == 1 or not measures.target.is_known:
            return False
        return self._promised_rate(self.way) < _REST_BELOW * measures.plain_rate

    def _choose_way(self, trial: _Trial) -> None:
        """Begin to try the other way to speculate, or end such a try."""
        measures = self._measures
        trial.num_in_way += 1
        other = Way.DRAFTED if trial.way is Way.PREPARED else Way.PREPARED
        if trial.is_trying:
            if measures.of_way(trial.way).num_rounds < self._rounds(_TRY_ROUNDS):
                return
            if measures.of_way(trial.way).value > measures.of_way(other).value:
                trial.untried, trial.compared_at = _TRY_AGAIN_AFTER, 0
                trial.take(trial.way, is_trying=False)
            else:
                trial.untried = min(max(trial.untried * 2, _TRY_ROUNDS), _LONGEST_UNTRIED)
                trial.take(other, is_trying=False)
            return
        is_due = trial.num_in_way >= trial.untried and not self.is_on_trial and not self._is_crowded
        if is_due and self._may_be_faster(other):
            measures.measure_anew(other)
            trial.take(other, is_trying=True)

    def _may_be_faster(self, way: Way) -> bool:
        """Than the usual way, and than plain decoding. How much of the draft's time is hidden by preparing,
        only a try can show."""
        measures = self._measures
        usual = measures.of_way(self.way).value
        return self._promised_rate(way) > max(usual, _REST_BELOW * measures.plain_rate)

    def _promised_rate(self, way: Way) -> float:
        """The most that this way can give. Where outcomes are prepared the target may never have to wait."""
        measures = self._measures
        step_ns = 0.0 if way is Way.PREPARED else measures.step.predict_ns(measures.num_active)
        return measures.promised_rate(self._depth, step_ns=step_ns)
