"""What the speculator measures as it runs: times, acceptance, and the speed of the whole engine.

Knows nothing of trees or messages; the stage feeds it. Speeds are kept apart by the size of the batch (one
request, two, three or four, five to eight, and so on): what pays for one request need not pay for many.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from enum import Enum

import numpy as np

from pipeline.messages import PlanFigures
from stages.draft_speculator.calibration import Calibration
from stages.draft_speculator.ngram_draft import MAX_NGRAM
from stages.draft_speculator.time_model import TimeModel

_DECAY = 0.97
"""Per round: the last thirty or so count."""
_SLOW_DECAY = 0.99
"""The last hundred or so, of what is compared: how many tokens a round gives is for the most part chance."""
_KNOWN_AFTER = 6
"""Rounds of a request before the figures are gone by."""
_TURNAROUND_SHARE = 0.1
_LONGEST_TURNAROUND_NS = 5e6
_NUM_DELAYS = 32
_PROMISE_WEIGHT = 30.0
"""Tokens for which promises are held to be kept, whatever came of them: luck shall not judge a short try."""
_LONG_ROUND = 4.0
"""A round that took this many times the mean waited for something else: another request's prefill."""


class Delays:
    """How much later than expected outcomes came lately."""

    def __init__(self) -> None:
        self._ns: deque[float] = deque(maxlen=_NUM_DELAYS)

    def add(self, ns: float) -> None:
        """An outcome came so much later, or earlier where it is negative."""
        self._ns.append(ns)

    def late_ns(self, step_ns: Sequence[float], *, left_ns: float) -> list[float]:
        """How long draft steps of these lengths, begun now, are likely to keep the target waiting.

        left_ns: until the outcome is expected, which has not come yet; negative where it is overdue.
        """
        ahead = left_ns + np.array(self._ns or [0.0])
        ahead = ahead[ahead > 0]
        if not len(ahead):  # later than ever: it may come at any moment
            ahead = np.zeros(1)
        late: list[float] = np.maximum(np.array(step_ns)[:, None] - ahead, 0.0).mean(axis=1).tolist()
        return late


class Rate:
    """Tokens over time, with forgetting."""

    def __init__(self, decay: float = _DECAY) -> None:
        self._decay = decay
        self.tokens = self.ns = 0.0
        self.num_rounds = 0

    def add(self, tokens: float, ns: float) -> None:
        """A round."""
        if self.num_rounds:
            ns = min(ns, _LONG_ROUND * self.ns / self.weight)
        self.tokens = self.tokens * self._decay + tokens
        self.ns = self.ns * self._decay + ns
        self.num_rounds += 1

    @property
    def weight(self) -> float:
        """Sum of the rounds' weights."""
        return (1 - self._decay**self.num_rounds) / (1 - self._decay)

    @property
    def value(self) -> float:
        """Tokens per ns; 0 before the first round."""
        return self.tokens / self.ns if self.ns else 0.0


class Promises:
    """How many tokens the target accepts, of those that proposals promised, with forgetting.

    A proposal promises the sum of its nodes' chances. What it gives is for the most part chance, so speeds
    are compared by what was promised, times the share of promises that is kept.
    """

    def __init__(self) -> None:
        self._accepted = self._promised = 0.0

    def settle(self, *, accepted: int, promised: float) -> float:
        """A round promised and gave so many tokens; returns how many such a round gives on average."""
        if promised == 0.0:
            return float(accepted)  # random ones, if any
        self._accepted = self._accepted * _SLOW_DECAY + accepted
        self._promised = self._promised * _SLOW_DECAY + promised
        return promised * (self._accepted + _PROMISE_WEIGHT) / (self._promised + _PROMISE_WEIGHT)


class Way(Enum):
    """How a round comes by its proposal."""

    PLAIN = "it has none"
    DRAFTED = "drafted after the outcome, as in linear speculation"
    PREPARED = "outcomes were prepared while the target verified"


class Pace:
    """How fast one request is served, in batches of about one size."""

    def __init__(self) -> None:
        self.all = Rate()
        self.of_way = {way: Rate(_SLOW_DECAY) for way in Way}
        """Since each was last begun to be measured anew."""
        self.plain_before = 0.0
        """Plain decoding as it was measured before, until it has been for long enough this time."""


class Measures:
    """Owned by the speculator, shared by all its requests."""

    def __init__(self) -> None:
        self.target = TimeModel()
        """Of a verification, by the rows of the whole batch."""
        self.step = TimeModel()
        """Of a draft step, by the rows it reads."""
        self.delays = Delays()
        self.calibration = Calibration()
        self.look_up = {size: Ratio(0.15 * size) for size in range(1, MAX_NGRAM + 1)}
        """How often a looked-up token is right if those before it were, by the tokens that matched."""
        self.promises = {way: Promises() for way in (*Way, None)}
        """By the way of the round: what is prepared is served in other stretches of the text."""
        self._acceptance = Ratio(0.5)
        self.hits = Ratio(0.5)
        """How often something was ready for an outcome."""
        self._paces: defaultdict[int, Pace] = defaultdict(Pace)
        """By class of batch."""
        self._turnaround_ns = 0.0
        self.num_active = 1
        """Requests that share the coming round..."""
        self.num_waiting = 0
        """...and those whose prompt is still read: whoever makes the target wait keeps them waiting, too."""
        self.reads_prompts = False
        """Whether the last forward read parts of prompts, as the next one is likely to."""

    @property
    def batch_class(self) -> int:
        """Sizes of one class are held to be alike: a full batch, of a power of two, and one nearly full."""
        return (self.num_active - 1).bit_length()

    @property
    def _pace(self) -> Pace:
        return self._paces[self.batch_class]

    @property
    def is_known(self) -> bool:
        """Whether there is enough to plan by."""
        num_seen = self._pace.all.num_rounds * self.num_active
        return self.target.is_known and self.step.is_known and num_seen >= _KNOWN_AFTER

    @property
    def acceptance(self) -> float:
        """How often the target goes on to a child of a node that it reached."""
        return self._acceptance.value

    @property
    def price(self) -> float:
        """Tokens lost a ns, when all requests wait."""
        return self._pace.all.value * (self.num_active + self.num_waiting)

    @property
    def price_of_row(self) -> float:
        """Tokens lost by one row more in a verification."""
        return self.price * self.target.slope_ns

    @property
    def plain_rate(self) -> float:
        """Of one request in rounds without: as measured while resting, else what the target's times say."""
        pace = self._pace
        plain = pace.of_way[Way.PLAIN]
        if plain.num_rounds >= _KNOWN_AFTER:
            return plain.value
        return pace.plain_before or 1 / self.target.predict_ns(self.num_active)

    def of_way(self, way: Way) -> Rate:
        """Of one request in rounds of this way, since `measure_anew`."""
        return self._pace.of_way[way]

    def measure_anew(self, way: Way) -> None:
        """Forget how fast it was."""
        pace = self._pace
        plain = pace.of_way[Way.PLAIN]
        if way is Way.PLAIN and plain.num_rounds >= _KNOWN_AFTER:
            pace.plain_before = plain.value
        pace.of_way[way] = Rate(_SLOW_DECAY)

    def promised_rate(self, depth: int, *, step_ns: float) -> float:
        """What Theorem 7 promises one request with chains of the best depth up to this one.

        step_ns: for which the target waits, a token of them.
        """
        batch, tokens, best = self.num_active, 1.0, 0.0
        for level in range(1, depth + 1):
            tokens += self.acceptance**level
            ns = self.target.predict_ns(batch * (1 + level)) + level * step_ns
            best = max(best, tokens / ns)
        return best

    def verification_ns(self, rows: int) -> float:
        """From a proposal's sending to the target's choices."""
        return self._turnaround_ns + self.target.predict_ns(rows)

    def add_turnaround(self, ns: float) -> None:
        """So long a proposal was under way, and waited for others of its batch."""
        self._turnaround_ns += _TURNAROUND_SHARE * (min(ns, _LONGEST_TURNAROUND_NS) - self._turnaround_ns)

    def figures(self, *, way: Way, num_branches: int) -> PlanFigures | None:
        """For the metrics; None before `is_known`. way: in which it speculates."""
        if not self.is_known:
            return None
        return PlanFigures(
            verify_ms=self.target.predict_ns(self.num_active) / 1e6,
            verify_row_ms=self.target.slope_ns / 1e6,
            step_ms=self.step.predict_ns(1) / 1e6,
            step_row_ms=self.step.slope_ns / 1e6,
            acceptance=self.acceptance,
            hit_rate=self.hits.value,
            tokens_per_second=self._pace.all.value * self.num_active * 1e9,
            speculative_tokens_per_second=self.of_way(way).value * 1e9,
            plain_tokens_per_second=self.plain_rate * 1e9,
            least_chance=self.price_of_row,
            num_branches=num_branches,
        )

    def add_round(self, *, tokens: float, ns: float, way: Way | None) -> None:
        """A round of the batch took `ns`, from decision to decision, and gave each request `tokens` tokens.

        tokens: see `Promises`, so that chance is left out.
        way: None where it was of no single one, and is typical of none.
        """
        self._pace.all.add(tokens, ns)
        if way is not None:
            self.of_way(way).add(tokens, ns)

    def add_continuation(self, *, was_accepted: bool) -> None:
        """The target reached a node with children; it went on to one, or did not."""
        self._acceptance.add(was_accepted)


class Ratio:
    """How often something is so, with forgetting."""

    def __init__(self, start: float) -> None:
        """start: the value before the first observation, which counts as five."""
        self._start = start
        self._yes = self._all = 0.0

    def add(self, is_so: bool) -> None:
        """One observation."""
        self._yes = self._yes * 0.99 + is_so
        self._all = self._all * 0.99 + 1

    @property
    def value(self) -> float:
        """Between 0 and 1, never either."""
        return (self._yes + 5 * self._start) / (self._all + 5)
