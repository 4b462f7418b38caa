"""Requests that share rounds: chunked prompts, hits beside misses, joins and ends, in every message order."""

from __future__ import annotations

import pytest
import torch

from conf.schema import Backup, PlanMode
from pipeline.messages import CancelRequest, FinishReason, Sampling, StageName
from stages.draft_speculator.draft_request import Phase
from stages.draft_speculator.draft_source import ExtendJob
from stages.draft_speculator.measures import Way
from stages.draft_speculator.model_draft import ModelDraft
from stages.draft_speculator.planner import Planner
from stages.draft_speculator.stage import DraftSpeculator
from stages.model.batch import ForwardBatch
from stages.target_verifier.stage import TargetVerifier
from tests.tiny import (
    SYSTEMS,
    PlainDecoder,
    ScriptedDraft,
    TinyPipeline,
    draft_by_name,
    system_config,
    tiny_target,
)

PROMPTS = {
    "short": [17, 3, 99, 42, 8, 17, 3],
    "long": [(7 * i * i + 3 * i) % 120 + 6 for i in range(100)],
    "one": [120],
    "middle": list(range(40, 75)),
    "looping": [9, 10, 11] * 9,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _sampling(index: int, max_tokens: int = 8) -> Sampling:
    return Sampling(max_tokens=max_tokens + 5 * index, temperature=0.3 * index, seed=50 + index)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What each request gets alone, from the plain loop."""
    plain = PlainDecoder(tiny_target())
    return {name: plain.generate(prompt, _sampling(i)) for i, (name, prompt) in enumerate(PROMPTS.items())}


def _pipeline(
    system: str,
    *,
    chunk: int = 8,
    draft: str = "noisy",
    order_seed: int | None = None,
    target_is_slow: bool = True,
    plan: PlanMode = PlanMode.fixed,
    backup: Backup = Backup.sequential,
    max_requests: int = 3,
) -> TinyPipeline:
    config = system_config(system, max_requests=max_requests)
    config.placement.prefill_chunk = chunk
    config.speculation.plan = plan
    config.speculation.backup = backup
    target = tiny_target()
    source = None if system == "autoregressive" else draft_by_name(draft, target, page_size=4)
    return TinyPipeline(config, target, source, order_seed=order_seed, target_is_slow=target_is_slow)


def _run_all(pipeline: TinyPipeline, expected: dict[str, list[int]]) -> None:
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        pipeline.submit(name, prompt, _sampling(index))
    pipeline.finish(*PROMPTS)
    for name in PROMPTS:
        assert pipeline.recorder.tokens(name) == expected[name], name
    assert_nothing_is_held(pipeline)


def assert_nothing_is_held(pipeline: TinyPipeline) -> None:
    verifier = pipeline.runtime.stages[StageName.VERIFIER]
    assert isinstance(verifier, TargetVerifier)
    verifier._runner.kv.check_integrity()
    speculator = pipeline.runtime.stages.get(StageName.SPECULATOR)
    if isinstance(speculator, DraftSpeculator):
        assert speculator._requests == {}
        if isinstance(speculator._source, ModelDraft):
            speculator._source._runner.kv.check_integrity()


@pytest.mark.parametrize(("chunk", "order_seed"), [(1, 1), (8, None), (8, 2), (33, 3)])
@pytest.mark.parametrize("system", SYSTEMS)
def test_prompts_read_in_chunks_give_the_tokens_of_the_plain_loop(
    expected: dict[str, list[int]], system: str, chunk: int, order_seed: int | None
) -> None:
    _run_all(_pipeline(system, chunk=chunk, order_seed=order_seed), expected)


@pytest.mark.parametrize(
    ("draft", "target_is_slow"), [("oracle", True), ("oracle", False), ("scripted", True), ("ngram", False)]
)
@pytest.mark.parametrize("system", ["speculative", "saguaro_tree"])
def test_batches_are_exact_whatever_drafts(
    expected: dict[str, list[int]], system: str, draft: str, target_is_slow: bool
) -> None:
    _run_all(_pipeline(system, draft=draft, target_is_slow=target_is_slow), expected)


@pytest.mark.parametrize("order_seed", range(3))
@pytest.mark.parametrize("plan", list(PlanMode))
@pytest.mark.parametrize("backup", [Backup.sequential, Backup.auto])
@pytest.mark.parametrize("system", ["ssd", "saguaro_tree"])
def test_hits_beside_misses_are_exact_in_every_message_order(
    expected: dict[str, list[int]], system: str, backup: Backup, plan: PlanMode, order_seed: int
) -> None:
    _run_all(_pipeline(system, backup=backup, plan=plan, order_seed=order_seed, max_requests=4), expected)


def _record_forwards(pipeline: TinyPipeline) -> list[ForwardBatch]:
    """Every batch that the target computes from now on."""
    pipeline.runtime.start()
    verifier = pipeline.runtime.stages[StageName.VERIFIER]
    assert isinstance(verifier, TargetVerifier)
    batches: list[ForwardBatch] = []
    forward = verifier._runner.forward

    def record(batch: ForwardBatch) -> torch.Tensor:
        batches.append(batch)
        return forward(batch)

    verifier._runner.forward = record  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("system", SYSTEMS)
def test_between_two_rounds_of_a_running_request_the_target_reads_no_more_than_a_chunk(system: str) -> None:
    pipeline = _pipeline(system, chunk=8)
    batches = _record_forwards(pipeline)
    pipeline.submit("runs", PROMPTS["short"], Sampling(max_tokens=60, seed=1))
    pipeline.runtime.run_until(lambda: len(pipeline.recorder.tokens("runs")) > 3)
    num_before = len(batches)
    pipeline.submit("joins", PROMPTS["long"], Sampling(max_tokens=4, seed=2))
    pipeline.submit("joins too", PROMPTS["middle"], Sampling(max_tokens=4, seed=2))
    pipeline.runtime.run_until(lambda: bool(pipeline.recorder.tokens("joins")))
    joining = batches[num_before:]
    runs_kv = batches[0].sequences[0].kv
    prompt_rows = [
        sum(s.num_rows for s in batch.sequences if s.kv is not runs_kv and s.prefix_len % 8 == 0)
        for batch in joining
    ]
    assert max(prompt_rows) == 8
    assert sum(prompt_rows) >= 100
    assert all(batch.sequences[0].kv is runs_kv for batch in joining), "it has a round in every forward"
    # Logits: the rows of rounds, and one for a prompt that is read to its end.
    for batch in joining[:-1]:
        num_round_rows = batch.sequences[0].num_rows
        assert batch.logit_rows is None or len(batch.logit_rows) <= num_round_rows + 2


def _speculator(pipeline: TinyPipeline) -> DraftSpeculator:
    pipeline.runtime.start()
    speculator = pipeline.runtime.stages[StageName.SPECULATOR]
    assert isinstance(speculator, DraftSpeculator)
    return speculator


def _record_steps(pipeline: TinyPipeline, request_id: str) -> list[tuple[Phase, dict[str, int]]]:
    """Every step that the draft takes from now on: the phase of a request, and the rows of each request."""
    speculator = _speculator(pipeline)
    steps: list[tuple[Phase, dict[str, int]]] = []
    requests, extend = speculator._requests, speculator._source.extend

    def record(jobs: list[ExtendJob]) -> None:
        steps.append((requests[request_id].phase, {job.request_id: len(job.nodes) for job in jobs}))
        extend(jobs)

    speculator._source.extend = record  # type: ignore[method-assign, assignment]
    return steps


@pytest.mark.parametrize("target_is_slow", [False, True])
@pytest.mark.parametrize("system", ["speculative", "tree", "ssd", "saguaro", "saguaro_tree"])
def test_a_draft_that_reads_a_long_prompt_goes_on_to_serve_others(system: str, target_is_slow: bool) -> None:
    pipeline = _pipeline(system, chunk=8, target_is_slow=target_is_slow)
    pipeline.submit("runs", PROMPTS["short"], Sampling(max_tokens=90, seed=1))
    pipeline.runtime.run_until(lambda: len(pipeline.recorder.tokens("runs")) > 3)
    steps = _record_steps(pipeline, "runs#1")
    pipeline.submit("joins", PROMPTS["long"], Sampling(max_tokens=4, seed=2))
    pipeline.runtime.run_until(lambda: pipeline.recorder.end("joins") is not None)
    is_read = [rows == {"joins#2": 8} for _, rows in steps]
    # A target that takes no time leaves the draft none to read in.
    assert sum(is_read) == 100 // 8 or not target_is_slow
    prepares = (Phase.GLUING, Phase.BRANCHING)
    for index, (phase, _) in enumerate(steps):
        if is_read[index] and index > 1:
            assert phase is not Phase.DRAFTING, "the target waits"
            # Now and then its turn passes without a step: all that it would read was read.
            assert phase not in prepares or not all(is_read[index - 2 : index]), "it is the other's turn"


@pytest.mark.parametrize("num_steps", range(1, 40, 4))
@pytest.mark.parametrize("system", ["autoregressive", "saguaro"])
def test_a_request_cancelled_while_its_prompt_is_read_frees_everything(system: str, num_steps: int) -> None:
    pipeline = _pipeline(system, chunk=8, order_seed=num_steps)
    pipeline.submit("gone", PROMPTS["long"], Sampling(max_tokens=60, seed=1))
    pipeline.submit("stays", PROMPTS["short"], _sampling(0))
    for _ in range(num_steps):
        pipeline.runtime._step()
    pipeline.runtime.send(StageName.VERIFIER, CancelRequest(request_id="gone"))
    pipeline.finish("stays")
    assert pipeline.recorder.tokens("stays") == PlainDecoder(tiny_target()).generate(
        PROMPTS["short"], _sampling(0)
    )
    end = pipeline.recorder.end("gone")
    if end is not None:
        assert end.finish_reason is FinishReason.CANCELLED
        assert end.metrics is not None
        assert end.metrics.ttft_ms > 0
    assert_nothing_is_held(pipeline)


def _oracle_for_all_but(prompt: list[int]) -> ScriptedDraft:
    """Right for every request, and always wrong for the one with this prompt."""
    plain, greedy = PlainDecoder(tiny_target()), Sampling(max_tokens=1, seed=0)

    def script(path: list[int]) -> list[int]:
        ranked = plain.law(path, greedy)[0].argsort(descending=True).tolist()
        return ranked[-1:] if path[: len(prompt)] == prompt else ranked[:6]

    return ScriptedDraft(script)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_miss_keeps_nobody_waiting_who_hit(is_alone: bool) -> None:
    """In a batch it is verified with an empty tree; alone it waits for its backup."""
    config = system_config("ssd", max_requests=2, depth=3, budget=12)
    pipeline = TinyPipeline(config, tiny_target(), _oracle_for_all_but(PROMPTS["middle"]))
    if not is_alone:
        pipeline.submit("hits", PROMPTS["short"], Sampling(max_tokens=60, seed=0))
    pipeline.submit("misses", PROMPTS["middle"], Sampling(max_tokens=9, seed=0))
    pipeline.finish("misses")
    end = pipeline.recorder.end("misses")
    assert end is not None
    assert end.metrics is not None
    assert end.metrics.cache_hits == 0
    assert (end.metrics.num_proposed_tokens > 0) == is_alone


class _Sleepy(Planner):
    """Rests for three rounds after every other one that is not a rest."""

    asked = 0

    def rest_rounds(self) -> int:
        self.asked += 1
        return 3 if self.asked % 2 else 0


@pytest.mark.parametrize("order_seed", [None, 1, 2])
@pytest.mark.parametrize("system", ["speculative", "saguaro_tree"])
def test_a_batch_rests_together_whoever_joins_and_leaves(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]], system: str, order_seed: int | None
) -> None:
    monkeypatch.setattr("stages.draft_speculator.stage.Planner", _Sleepy)
    pipeline = _pipeline(system, order_seed=order_seed)
    speculator = _speculator(pipeline)
    rests: list[set[int]] = []
    answer = speculator._answer

    def record() -> None:
        running = speculator._in_phase(Phase.ANSWERING)
        answer()
        rests.append({r.rest_left if r.is_resting else -1 for r in running})

    speculator._answer = record  # type: ignore[method-assign]
    _run_all(pipeline, expected)
    assert all(len(left) <= 1 for left in rests), "all rest, for as long"
    assert sum(left not in ({-1}, set()) for left in rests) > 10


def test_a_rest_that_follows_a_round_of_catching_up_is_measured_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stages.draft_speculator.stage.Planner", _SleepyLater)
    monkeypatch.setattr("stages.draft_speculator.stage._MOST_BEHIND", 3)
    pipeline = _pipeline("speculative", target_is_slow=False)
    measures = _speculator(pipeline)._measures
    ways: list[Way | None] = []
    turnarounds: list[float] = []
    monkeypatch.setattr(measures, "add_round", lambda **figures: ways.append(figures["way"]))
    monkeypatch.setattr(measures, "add_turnaround", turnarounds.append)
    pipeline.submit("r", PROMPTS["long"], Sampling(max_tokens=40, seed=1, ignore_eos=True))
    pipeline.runtime.run_until(lambda: len(ways) == 5)
    assert ways == [None, Way.PLAIN, Way.PLAIN, Way.PLAIN, Way.PLAIN]
    assert len(turnarounds) == 1, "nothing was under way while speculation rested"


class _Resting(Planner):
    """Rests for good while there are three requests, and never with fewer."""

    def rest_rounds(self) -> int:
        return 200 if self.measures.num_active == 3 else 0


@pytest.mark.parametrize("order_seed", [None, 1, 2])
@pytest.mark.parametrize("system", ["speculative", "saguaro", "saguaro_tree"])
def test_a_rest_is_over_when_half_of_the_batch_is_gone(
    monkeypatch: pytest.MonkeyPatch, system: str, order_seed: int | None
) -> None:
    monkeypatch.setattr("stages.draft_speculator.stage.Planner", _Resting)
    pipeline = _pipeline(system, order_seed=order_seed)
    plain = PlainDecoder(tiny_target())
    for index, max_tokens in enumerate((20, 24, 60)):
        sampling = Sampling(max_tokens=max_tokens, seed=index, ignore_eos=True)
        pipeline.submit(str(index), PROMPTS["short"], sampling)
    pipeline.finish("0", "1", "2")
    for index, max_tokens in enumerate((20, 24, 60)):
        sampling = Sampling(max_tokens=max_tokens, seed=index, ignore_eos=True)
        assert pipeline.recorder.tokens(str(index)) == plain.generate(PROMPTS["short"], sampling)
    ends = [pipeline.recorder.end(str(index)) for index in range(3)]
    rested = [end.metrics.num_rest_rounds for end in ends if end is not None and end.metrics is not None]
    assert rested[1] > 10
    assert rested[2] < 30, "and not for the last one alone"


class _RestingAlone(Planner):
    """Rests for good while there is one request, and never with more."""

    def rest_rounds(self) -> int:
        return 200 if self.measures.num_active == 1 else 0


@pytest.mark.parametrize("order_seed", [None, 1, 2])
@pytest.mark.parametrize("system", ["speculative", "saguaro", "saguaro_tree"])
def test_a_rest_is_over_when_the_batch_has_doubled(
    monkeypatch: pytest.MonkeyPatch, system: str, order_seed: int | None
) -> None:
    monkeypatch.setattr("stages.draft_speculator.stage.Planner", _RestingAlone)
    pipeline = _pipeline(system, order_seed=order_seed)
    speculator = _speculator(pipeline)
    sampling = {name: Sampling(max_tokens=60, seed=1, ignore_eos=True) for name in ("first", "long", "short")}
    pipeline.submit("first", PROMPTS["short"], sampling["first"])
    pipeline.runtime.run_until(lambda: any(0 < r.rest_left < 190 for r in speculator._requests.values()))
    for name in ("long", "short"):
        pipeline.submit(name, PROMPTS[name], sampling[name])
    pipeline.finish("first", "long", "short")
    plain = PlainDecoder(tiny_target())
    for name in ("first", "long", "short"):
        prompt = PROMPTS["short" if name == "first" else name]
        assert pipeline.recorder.tokens(name) == plain.generate(prompt, sampling[name])
        end = pipeline.recorder.end(name)
        assert end is not None
        assert end.metrics is not None
        assert end.metrics.num_proposed_tokens > 0, "which was never found to be slower in a batch"
        assert (end.metrics.num_rest_rounds > 9) == (name == "first")


@pytest.mark.parametrize("order_seed", [None, 1])
def test_only_those_who_have_no_token_yet_wait_for_one(
    expected: dict[str, list[int]], order_seed: int | None
) -> None:
    pipeline = _pipeline("saguaro", plan=PlanMode.auto, order_seed=order_seed, chunk=8)
    speculator = _speculator(pipeline)
    counts: list[tuple[int, int]] = []
    answer = speculator._answer

    def record() -> None:
        answer()
        # Of those with a token, none is counted, though some have just ended and are not forgotten yet.
        without = sum(request.round_id == 0 for request in speculator._requests.values())
        counts.append((speculator._measures.num_waiting, without))

    speculator._answer = record  # type: ignore[method-assign]
    _run_all(pipeline, expected)
    assert all(counted == without for counted, without in counts)
    assert {counted > 0 for counted, _ in counts} == {False, True}


@pytest.mark.parametrize("order_seed", [None, 1, 2])
@pytest.mark.parametrize("system", ["tree", "saguaro_tree"])
def test_chains_and_trees_may_follow_one_another(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]], system: str, order_seed: int | None
) -> None:
    monkeypatch.setattr("stages.draft_speculator.planner._MOST_TREES", 1)
    monkeypatch.setattr("stages.draft_speculator.trials._PREPARE_FIRST", 1)
    monkeypatch.setattr("stages.draft_speculator.trials._TRY_AGAIN_AFTER", 3)
    pipeline = _pipeline(system, plan=PlanMode.auto, order_seed=order_seed)
    speculator = _speculator(pipeline)
    are_chains: set[bool] = set()
    answer = speculator._answer

    def record() -> None:
        answer()
        are_chains.add(speculator._planner.shape.is_chain)

    speculator._answer = record  # type: ignore[method-assign]
    _run_all(pipeline, expected)
    assert are_chains == {False, True}


@pytest.mark.parametrize("order_seed", [None, 1])
def test_every_request_of_a_batch_learns_what_its_rounds_were_planned_by(order_seed: int | None) -> None:
    pipeline = _pipeline("saguaro", plan=PlanMode.auto, order_seed=order_seed)
    for name in ("short", "middle", "looping"):
        pipeline.submit(name, PROMPTS[name], Sampling(max_tokens=50, seed=1, ignore_eos=True))
    pipeline.finish("short", "middle", "looping")
    ends = [pipeline.recorder.end(name) for name in ("short", "middle", "looping")]
    plans = [end.metrics.plan for end in ends if end is not None and end.metrics is not None]
    assert all(plan is not None and plan.verify_ms > 0 for plan in plans)
    assert len(plans) == 3


class _LongAsleep(Planner):
    """Rests for 30 rounds, once, when there are so many requests."""

    num_requests = 1
    left = 0
    has_rested = False

    @property
    def rest_left(self) -> int:
        return self.left

    def rest_rounds(self) -> int:
        if not self.has_rested and self.measures.num_active == self.num_requests:
            self.left, self.has_rested = 30, True
        return self.left

    def goes_on_resting(self, rounds: int) -> None:
        self.left = rounds


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_prompt_that_comes_in_a_rest_is_read_before_its_end_and_not_at_once(
    monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """What the draft reads slows the target, and the rest may go on after it."""
    monkeypatch.setattr("stages.draft_speculator.stage.Planner", _LongAsleep)
    monkeypatch.setattr(_LongAsleep, "num_requests", 1 if is_alone else 2)
    pipeline = _pipeline("saguaro", chunk=32)
    speculator = _speculator(pipeline)
    first, second = (Sampling(max_tokens=50, seed=seed, ignore_eos=True) for seed in (1, 2))
    pipeline.submit("first", PROMPTS["short"], first)
    if not is_alone:
        pipeline.submit("beside it", PROMPTS["short"], first)
    pipeline.runtime.run_until(lambda: 0 < speculator._planner.rest_left < 28)
    if is_alone:
        pipeline.runtime.send(StageName.VERIFIER, CancelRequest(request_id="first"))
        pipeline.finish("first")
    pipeline.submit("second", PROMPTS["long"], second)
    num_read_at: dict[int, int] = {}

    def is_over() -> bool:
        request = next((r for r in speculator._requests.values() if r.seed == 2), None)
        if request is not None:
            num_read_at[speculator._planner.rest_left] = request.tree.num_read_committed
        return pipeline.recorder.end("second") is not None

    pipeline.runtime.run_until(is_over)
    assert num_read_at[20] == 0, "in the middle of the rest"
    assert num_read_at[0] > len(PROMPTS["long"])
    assert pipeline.recorder.tokens("second") == PlainDecoder(tiny_target()).generate(PROMPTS["long"], second)
    end = pipeline.recorder.end("second")
    assert end is not None
    assert end.metrics is not None
    assert end.metrics.num_proposed_tokens > 0, "and afterwards it speculates"


class _Undecided(Planner):
    """Outcomes are prepared in three rounds of the batch, and not in the next three."""

    asked = 0

    def rest_rounds(self) -> int:
        self.asked += 1
        return 0

    def prepares(self) -> bool:
        return self.asked % 6 < 3


@pytest.mark.parametrize("order_seed", [None, 1, 2])
@pytest.mark.parametrize("backup", Backup)
@pytest.mark.parametrize("system", ["saguaro", "saguaro_tree"])
def test_whether_outcomes_are_prepared_may_change_from_round_to_round(
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, list[int]],
    system: str,
    backup: Backup,
    order_seed: int | None,
) -> None:
    monkeypatch.setattr("stages.draft_speculator.stage.Planner", _Undecided)
    pipeline = _pipeline(system, order_seed=order_seed, backup=backup)
    measures = _speculator(pipeline)._measures
    ways: list[Way | None] = []
    monkeypatch.setattr(measures, "add_round", lambda **figures: ways.append(figures["way"]))
    _run_all(pipeline, expected)
    assert {Way.PREPARED, Way.DRAFTED, None} <= set(ways)
    assert measures.hits.value != 0.5, "measured where outcomes were prepared"
    all_metrics = [end.metrics for name in PROMPTS if (end := pipeline.recorder.end(name)) is not None]
    answered = sum(metrics.num_rounds - 1 for metrics in all_metrics if metrics is not None)
    looked_for = sum(m.cache_hits + m.cache_misses for m in all_metrics if m is not None)
    assert 0 < looked_for < answered, "where nothing was to be found, nothing was missed"


class _SleepyLater(Planner):
    """Rests for three rounds after the second answer."""

    asked = 0

    def rest_rounds(self) -> int:
        self.asked += 1
        return 3 if self.asked == 2 else 0
