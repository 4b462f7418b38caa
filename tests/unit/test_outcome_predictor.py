"""The predictor as a stage: what it plans, and from which statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from conf.schema import FanOut, RunConfig
from pipeline.errors import ProtocolError, StaleTensor
from pipeline.messages import Candidates, EndDraft, Message, Outcome, Plan, StageName
from pipeline.stage import StageContext
from pipeline.tensor_pool import PoolSpec, TensorPool, TensorRef, pool_bytes
from stages.outcome_predictor.stage import OutcomePredictor

SPEC = PoolSpec(name="candidate_ids", num_slots=2, shape=(3, 5), dtype="int32")
LOG_PROBS = PoolSpec(name="candidate_log_probs", num_slots=2, shape=(3, 5), dtype="float32")


class _Outbox:
    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def send(self, receiver: StageName, message: Message) -> None:
        assert receiver is StageName.SPECULATOR
        assert isinstance(message, Plan)
        self.plans.append(message)


class _NoPools:
    def export(self, spec: PoolSpec) -> TensorPool:
        raise AssertionError("the predictor exports nothing")


class _Setup:
    """A predictor with a budget of 4 for chains of 2, and the pool that a speculator would write."""

    def __init__(self, fan_out: FanOut = FanOut.geometric) -> None:
        config = RunConfig()
        config.speculation.fan_out = fan_out
        config.speculation.budget = 4
        self.outbox = _Outbox()
        self.predictor = OutcomePredictor(
            config, StageContext(outbox=self.outbox, pools=_NoPools(), settings=b"")
        )
        self.pool = TensorPool(SPEC, bytearray(pool_bytes(SPEC)), is_writable=True)
        self.log_probs = TensorPool(LOG_PROBS, bytearray(pool_bytes(LOG_PROBS)), is_writable=True)
        pools: Mapping[str, TensorPool] = {
            "candidate_ids": self.pool,
            "candidate_log_probs": self.log_probs,
        }
        self.predictor.setup()
        self.predictor.connect(pools)

    def candidates(
        self, request_id: str = "a", *, probs: list[float] | None = None, **changes: object
    ) -> Candidates:
        rows = np.arange(15, dtype=np.int32).reshape(3, 5)
        law = np.array(probs or [0.5, 0.2, 0.1, 0.1, 0.1], dtype=np.float32)
        fields = {
            "request_id": request_id,
            "round_id": 3,
            "token_ids": [0, 6],
            "parents": [-1, 0],
            "num_branches": 999,
            "candidate_ids": self.pool.write(rows),
            "candidate_log_probs": self.log_probs.write(np.log(np.tile(law, (3, 1)))),
            **changes,
        }
        return Candidates(**fields)  # type: ignore[arg-type]

    def shares(self, request_id: str = "a") -> list[int]:
        """Outcomes planned after the root, the first and the second node."""
        self.predictor.handle(self.candidates(request_id))
        return [self.outbox.plans[-1].nodes.count(node) for node in (-1, 0, 1)]


def _outcome(request_id: str, num_accepted: int, *, bonus_token: int = 1, round_id: int = 1) -> Outcome:
    return Outcome(
        request_id=request_id,
        round_id=round_id,
        committed_len=9,
        accepted_node=num_accepted - 1,
        bonus_token=bonus_token,
        num_accepted=num_accepted,
        num_proposed=2,
    )


def test_proposed_children_are_never_planned_as_bonus_tokens() -> None:
    setup = _Setup(FanOut.uniform)
    setup.predictor.handle(setup.candidates())
    plan = setup.outbox.plans[-1]
    assert (plan.request_id, plan.round_id) == ("a", 3)
    # Row 0 holds 0..4 and proposes 0, row 1 holds 5..9 and proposes 6, row 2 holds 10..14.
    assert sorted(zip(plan.nodes, plan.token_ids, strict=True)) == [(-1, 1), (-1, 2), (0, 5), (1, 10)]


def test_a_new_request_starts_from_the_acceptance_of_those_before_it() -> None:
    setup = _Setup()
    for _ in range(200):
        setup.predictor.handle(_outcome("old", 2))
    setup.predictor.handle(EndDraft(request_id="old"))
    setup.predictor.handle(_outcome("new", 2))
    assert setup.shares("new")[2] >= 3
    for _ in range(200):
        setup.predictor.handle(_outcome("bad", 0))
    setup.predictor.handle(EndDraft(request_id="bad"))
    assert setup.shares("next")[0] >= 3


def test_a_slot_that_was_written_again_is_stale_and_yields_no_plan() -> None:
    setup = _Setup()
    late = setup.candidates()
    for _ in range(SPEC.num_slots):
        setup.candidates()
    with pytest.raises(StaleTensor):
        setup.predictor.handle(late)
    assert setup.outbox.plans == []


def test_candidates_with_a_broken_tree_or_an_unknown_pool_are_refused() -> None:
    setup = _Setup()
    stray = TensorRef(pool="elsewhere", slot=0, generation=2)
    for changes in ({"parents": [-1, 5]}, {"parents": [-1]}, {"candidate_ids": stray}):
        with pytest.raises(ProtocolError):
            setup.predictor.handle(setup.candidates(**changes))
    assert setup.outbox.plans == []


def test_calibrated_takes_the_likeliest_outcomes_over_all_nodes() -> None:
    """Every row has the law 0.5 0.2 0.1 0.1 0.1. Proposed: 0 after the root, then 6, the second choice."""
    setup = _Setup(FanOut.calibrated)
    setup.predictor.handle(setup.candidates())
    plan = setup.outbox.plans[-1]
    # After the first node (reached with 0.5) token 5 has 0.5; after the root token 1 has 0.2.
    assert list(zip(plan.nodes, plan.token_ids, strict=True))[:2] == [(0, 5), (-1, 1)]
    assert [math.exp(log_prob) for log_prob in plan.log_probs] == pytest.approx([0.25, 0.2, 0.1, 0.1])


def test_calibrated_learns_how_sharp_the_target_is() -> None:
    """Where the target always takes the draft's first choice, the draft is worth trusting further down."""
    setup = _Setup(FanOut.calibrated)

    def last(node: int) -> float:
        plan = setup.outbox.plans[-1]
        return sum(math.exp(p) for n, p in zip(plan.nodes, plan.log_probs, strict=True) if n == node)

    proposed = {"token_ids": [0, 5], "parents": [-1, 0]}
    setup.predictor.handle(setup.candidates(**proposed))
    before = last(1)
    for _ in range(50):
        setup.predictor.handle(setup.candidates(**proposed))
        outcome = Outcome(
            request_id="a", round_id=3, committed_len=9, accepted_node=1, bonus_token=10, num_accepted=2,
            num_proposed=2,
        )  # fmt: skip
        setup.predictor.handle(outcome)
    setup.predictor.handle(setup.candidates(**proposed))
    assert last(1) > 0.9 > before


def test_an_outcome_that_the_draft_did_not_name_teaches_nothing_and_breaks_nothing() -> None:
    setup = _Setup(FanOut.calibrated)
    setup.predictor.handle(setup.candidates())
    setup.predictor.handle(_outcome("a", 0))
    setup.predictor.handle(_outcome("unknown", 0))
    setup.predictor.handle(setup.candidates())
    assert len(setup.outbox.plans) == 2


@pytest.mark.parametrize("fan_out", [FanOut.uniform, FanOut.geometric])
def test_after_a_filler_the_whole_budget_goes_to_the_root(fan_out: FanOut) -> None:
    setup = _Setup(fan_out)
    setup.predictor.handle(setup.candidates(is_filler=True))
    plan = setup.outbox.plans[-1]
    # Row 0 holds 0..4, of which 0 is proposed.
    assert list(zip(plan.nodes, plan.token_ids, strict=True)) == [(-1, 1), (-1, 2), (-1, 3), (-1, 4)]
    setup.predictor.handle(setup.candidates())
    assert set(setup.outbox.plans[-1].nodes) == {-1, 0, 1}


def test_what_a_filler_had_accepted_says_nothing_about_the_draft() -> None:
    setup = _Setup()
    before = setup.shares()
    for _ in range(100):
        setup.predictor.handle(setup.candidates(is_filler=True))
        setup.predictor.handle(_outcome("a", 0, round_id=3))
    assert setup.shares() == before


def test_the_exponent_of_the_miss_rate_is_learned_for_a_request_and_for_those_after_it() -> None:
    """Of 50 bonus tokens 25, 20, 4, 1 are first to fourth choices: the miss rate falls as F^-2 or faster."""
    setup = _Setup()

    def ratio(request_id: str) -> float:
        """How much likelier the first choice after the root is held to be than the second one."""
        setup.predictor.handle(setup.candidates(request_id, token_ids=[], parents=[]))
        first, second = setup.outbox.plans[-1].log_probs[:2]
        return math.exp(first - second)

    assert ratio("a") == pytest.approx(4.0)  # 2^(1 + r) at r = 1
    choices = [*[0] * 25, *[1] * 20, *[2] * 4, 3]
    for number in range(200):
        setup.predictor.handle(setup.candidates(token_ids=[], parents=[]))
        bonus_token = choices[number * 7 % len(choices)]
        setup.predictor.handle(_outcome("a", 0, bonus_token=bonus_token, round_id=3))
    assert ratio("a") > 4.5
    setup.predictor.handle(EndDraft(request_id="a"))
    assert ratio("b") > 4.5


def test_an_outcome_may_come_after_the_candidates_of_the_next_round() -> None:
    """As it does when the target is slow: the verifier tells the predictor last."""
    early, late = _Setup(FanOut.calibrated), _Setup(FanOut.calibrated)
    for round_id in range(40):
        early.predictor.handle(early.candidates(round_id=round_id))
        early.predictor.handle(_outcome("a", 2, bonus_token=10, round_id=round_id))
        late.predictor.handle(late.candidates(round_id=round_id))
        late.predictor.handle(_outcome("a", 2, bonus_token=10, round_id=round_id - 1))
    for setup in (early, late):
        setup.predictor.handle(setup.candidates(round_id=41))
    last = [setup.outbox.plans[-1].log_probs for setup in (early, late)]
    assert last[0] == pytest.approx(last[1], abs=0.05)
    assert last[0] != pytest.approx(early.outbox.plans[0].log_probs, abs=0.05)


@pytest.mark.parametrize("fan_out", list(FanOut))
def test_a_predictor_that_was_restarted_plans_without_its_statistics(fan_out: FanOut) -> None:
    """It first hears of a request in the middle of it, and of outcomes whose candidates it never saw."""
    fresh, restarted = _Setup(fan_out), _Setup(fan_out)
    restarted.predictor.handle(_outcome("a", 1, round_id=7))
    restarted.predictor.handle(restarted.candidates(round_id=8))
    fresh.predictor.handle(fresh.candidates(round_id=8))
    assert set(restarted.outbox.plans[0].token_ids) == set(fresh.outbox.plans[0].token_ids)
    restarted.predictor.handle(EndDraft(request_id="a"))


def test_nothing_grows_with_the_number_of_requests() -> None:
    setup = _Setup(FanOut.calibrated)
    for number in range(50):
        name = f"request {number}"
        setup.predictor.handle(setup.candidates(name))
        setup.predictor.handle(_outcome(name, 0, round_id=3))
        setup.predictor.handle(EndDraft(request_id=name))
        setup.predictor.handle(setup.candidates(name))  # late, after the end
    predictor = setup.predictor
    assert len(predictor._statistics) + len(predictor._rounds) <= 2
