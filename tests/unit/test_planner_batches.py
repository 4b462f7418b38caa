"""The planner on a scripted clock: batches of linear speculation on machines whose times are made up.

Linear speculation needs no overlap of target and draft, so one clock tells it all. Each request's tokens are
accepted by chance; what the planner chooses is held against the best fixed depth, plain decoding included.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from conf.schema import SpeculationConfig, TreeConfig
from stages.draft_speculator.growth import Entry, Shape
from stages.draft_speculator.measures import Measures, Way
from stages.draft_speculator.planner import OnlinePlanner
from tests.unit.planning import measured, online_planner

MS = 1_000_000
_DEPTH = 6


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Times in ms: of a verification and of a draft step, for one row and for each row more."""

    verify: float
    verify_row: float
    step: float
    step_row: float

    def verify_ns(self, rows: int) -> int:
        return int((self.verify + self.verify_row * rows) * MS)

    def step_ns(self, rows: int) -> int:
        return int((self.step + self.step_row * rows) * MS)

    def speed(self, batch: int, *, acceptance: float, depth: int) -> float:
        """Tokens a ms with `depth` tokens in every proposal, on average; depth 0 decodes plainly."""
        ns = depth * self.step_ns(batch) + self.verify_ns(batch * (1 + depth))
        return batch * sum(acceptance**level for level in range(depth + 1)) / ns * MS


class Run:
    """An engine on a scripted clock."""

    def __init__(self, machine: Machine, *, acceptance: float, seed: int = 1) -> None:
        self._machine = machine
        self._acceptance = acceptance
        self._random = random.Random(seed)
        self.measures = Measures()
        shape = Shape.of(SpeculationConfig(depth=_DEPTH))
        self.planner = OnlinePlanner(shape, self.measures, min_path_prob=0.0, budget=0)
        self._rest = self._rest_batch = 0
        self.num_resting = 0

    def planned(self, batch: int, rounds: int) -> float:
        """Tokens a ms with the planner."""
        tokens, ns = 0, 0
        for _ in range(rounds):
            round_tokens, round_ns = self._round(batch)
            tokens, ns = tokens + round_tokens, ns + round_ns
        return tokens / ns * MS

    def _num_accepted(self, size: int) -> int:
        count = 0
        while count < size and self._random.random() < self._acceptance:
            count += 1
        return count

    def _round(self, batch: int) -> tuple[int, int]:
        self.measures.num_active = batch
        if 2 * batch <= self._rest_batch:
            self._rest = self._rest_batch = 0
        if self._rest > 0:
            self.planner.goes_on_resting(self._rest - 1)
        elif rest := self.planner.rest_rounds():
            self._rest, self._rest_batch = rest + 1, batch
        is_plain = self._rest > 0
        sizes, ns = ([0] * batch, 0) if is_plain else self._draft(batch)
        self._rest -= is_plain
        self.num_resting += is_plain
        rows = batch + sum(sizes)
        verify_ns = self._machine.verify_ns(rows)
        accepted = [self._num_accepted(size) for size in sizes]
        self._learn(sizes, accepted)
        tokens = batch + sum(accepted)
        self.measures.target.add(rows, verify_ns)
        way = Way.PLAIN if is_plain else Way.DRAFTED
        self.measures.add_round(tokens=tokens / batch, ns=ns + verify_ns, way=way)
        return tokens, ns + verify_ns

    def _draft(self, batch: int) -> tuple[list[int], int]:
        """Sizes of the proposals, and the time that drafting them took."""
        ns = depth = 0
        while depth < _DEPTH:
            values = [[self._value(depth)]] * batch
            num_rows = sum(self.planner.waiting_reads(values))
            if num_rows == 0:
                break
            step_ns = self._machine.step_ns(num_rows)
            self.measures.step.add(num_rows, step_ns)
            ns, depth = ns + step_ns, depth + 1
        chain = [
            Entry(node - 1, node, math.log(self._acceptance), self._value(node + 1), node + 1, None)
            for node in range(depth)
        ]
        sizes: list[int] = []
        for index in range(batch):
            others = sum(1 + size for size in sizes) + batch - index - 1
            sizes.append(len(self.planner.keep(chain, other_rows=others)))
        return sizes, ns

    def _value(self, depth: int) -> float:
        return depth * self.planner.log_value(math.log(self._acceptance))

    def _learn(self, sizes: list[int], accepted: list[int]) -> None:
        for size, count in zip(sizes, accepted, strict=True):
            for depth in range(min(count + 1, size)):
                self.measures.add_continuation(was_accepted=depth < count)
                self.measures.calibration.add(math.log(self._acceptance), is_accepted=depth < count)


MACHINES = {
    "rows nearly free": Machine(verify=15, verify_row=0.05, step=2, step_row=0.01),
    "rows dear": Machine(verify=15, verify_row=3.0, step=2, step_row=0.1),
    "draft dear": Machine(verify=15, verify_row=0.1, step=9, step_row=0.3),
}


@pytest.mark.parametrize("acceptance", [0.1, 0.7])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_the_planner_is_never_much_slower_than_the_best_fixed_depth(
    machine: Machine, batch: int, acceptance: float
) -> None:
    """A tenth is for chance, for trials, and for what times of few row counts tell of the others."""
    speeds = [machine.speed(batch, acceptance=acceptance, depth=depth) for depth in range(_DEPTH + 1)]
    run = Run(machine, acceptance=acceptance)
    run.planned(batch, 150)  # until it has learned
    assert run.planned(batch, 300) > 0.9 * max(speeds)


def test_speculation_that_pays_alone_ends_in_a_batch_where_it_does_not() -> None:
    machine = MACHINES["rows dear"]
    run = Run(machine, acceptance=0.7)
    run.planned(1, 200)
    assert run.num_resting == 0
    run.planned(16, 100)
    assert run.planned(16, 400) > 0.97 * machine.speed(16, acceptance=0.7, depth=0)
    before = run.num_resting
    run.planned(1, 200)
    comparison = 9
    assert run.num_resting <= before + comparison, (
        "what was learned of batches says nothing about one request"
    )


def test_a_step_for_many_pays_where_one_for_a_single_one_of_them_does_not() -> None:
    run = Run(MACHINES["rows nearly free"], acceptance=0.8)
    run.planned(8, 100)
    root, nothing = [0.0], list[float]()
    assert run.planner.waiting_reads([root] * 8) == [1] * 8
    assert run.planner.waiting_reads([root, *[nothing] * 7]) == [0] * 8


def test_those_who_wait_for_a_first_token_count_in_the_price_of_a_row() -> None:
    planner = online_planner(measured(row=2.0))
    chain = [Entry(i - 1, i, 0.0, math.log(0.6 - 0.1 * i), i + 1, None) for i in range(4)]
    alone = len(planner.keep(chain, other_rows=0))
    planner.measures.num_waiting = 2
    assert 0 < len(planner.keep(chain, other_rows=0)) < alone


def test_trees_are_drafted_for_few_and_chains_where_many_wait_for_them() -> None:
    def is_chain(num_active: int, **tree: object) -> bool:
        shape = Shape.of(SpeculationConfig(depth=5, tree=TreeConfig(**tree)))  # type: ignore[arg-type]
        planner = OnlinePlanner(shape, Measures(), min_path_prob=0.0, budget=budget)
        planner.measures.num_active = num_active
        assert planner.shape.depth == shape.depth
        return planner.shape.is_chain

    budget = 0
    assert [is_chain(num, nodes=8) for num in (1, 4, 5, 16)] == [False, False, True, True]
    assert not is_chain(16, widths=[2, 1, 1, 1, 1]), "drawn tokens have the law of what is configured"
    budget = 24
    assert [is_chain(num, nodes=8) for num in (1, 4, 5)] == [False, False, True]


def test_branches_of_a_batch_are_read_for_whom_they_win_most() -> None:
    run = Run(MACHINES["draft dear"], acceptance=0.8)
    run.planned(4, 100)
    likely, unlikely = [math.log(0.9)] * 3, [math.log(1e-6)] * 3
    assert run.planner.branch_reads([unlikely, likely], left_ns=100 * MS) == [0, 3]
    assert run.planner.branch_reads([unlikely, unlikely], left_ns=0.0) == [0, 0]


def test_the_branches_that_there_is_time_for_are_shared_by_the_batch() -> None:
    measures = Measures()
    for rows in (1, 8, 16, 64):
        for _ in range(10):
            measures.target.add(rows, 20 * MS)
            measures.step.add(rows, (1 + 0.2 * rows) * MS)
    shape = Shape.of(SpeculationConfig(depth=4))
    planner = OnlinePlanner(shape, measures, min_path_prob=0.0, budget=64)
    counts = []
    for batch in (1, 16):
        measures.num_active = batch
        for _ in range(10):
            measures.add_round(tokens=3, ns=25 * MS, way=Way.PREPARED)
        for _ in range(40):
            planner.branch_reads([[math.log(0.5)] * 4] * batch, left_ns=20 * MS)
        counts.append(planner.num_branches())
    alone, together = counts
    assert together < alone / 2
