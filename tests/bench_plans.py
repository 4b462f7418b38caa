"""Plans, rows and workers for tests of the benchmark: nothing is loaded, and the times are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from conf.schema import DType, RunConfig
from pipeline.messages import RequestMetrics
from tests.fake_frontend_events import METRICS
from tools.bench.cases import Case, Phase
from tools.bench.entries import choose_baseline, parse_systems
from tools.bench.journal import Row
from tools.bench.plan import Plan, PlannedPrompt, PlannedSystem
from tools.bench.protocol import Answer, Batch, EngineSpec, PeerSpec, Question, Ready, Skipped, WorkerSpec
from tools.bench.settings import BenchSettings, LlamaFormat, SetUp
from tools.bench.worker_process import WorkerLost


def make_question(index: int = 0, *, max_tokens: int = 8) -> Question:
    return Question(
        text=f"question {index}",
        is_chat=True,
        prompt_token_ids=[index, 7, 9],
        max_tokens=max_tokens,
        seed=index,
    )


def make_batch(*questions: Question, temperature: float = 0.0) -> Batch:
    return Batch(questions=list(questions), temperature=temperature)


def make_peer(name: str) -> PeerSpec:
    return PeerSpec(
        name=name,
        folder="/nowhere",
        dtype=DType.bfloat16,
        cores=[0],
        max_context=512,
        batch_size=1,
        draft=None,
        assistant_tokens=None,
        lookup_tokens=10,
        llama_format=LlamaFormat.bf16,
    )


def make_plan(
    systems: str, *, sets: Sequence[str] = ("a",), num_prompts: int = 2, **settings: object
) -> Plan:
    """A plan without a model, of one set-up unless told otherwise. settings: fields of `BenchSettings`."""
    entries = parse_systems(systems)
    prompts = [
        PlannedPrompt(set_name=name, index=index, question=make_question(10 * number + index))
        for number, name in enumerate(sets)
        for index in range(num_prompts)
    ]
    all_settings = BenchSettings(out="nowhere", systems=systems)
    for key, value in {"setups": "same_total_cores", **settings}.items():
        setattr(all_settings, key, value)
    return Plan(
        settings=all_settings,
        folder=Path("/nowhere"),
        systems=[
            PlannedSystem(
                entry=entry,
                # The seed tells the fakes apart.
                spec=EngineSpec(config=RunConfig(seed=number)) if entry.is_ours else make_peer(entry.name),
            )
            for number, entry in enumerate(entries)
        ],
        baseline=choose_baseline(entries, all_settings.baseline),
        prompts=prompts,
    )


def make_answer(
    token_ids: Sequence[int] = (1, 2, 3, 4, 5),
    *,
    seconds: float = 2.0,
    ttft_ms: float = 62.5,
    num_rounds: int | None = None,
    metrics: RequestMetrics | None = None,
    num_prompt_tokens: int = 3,
    blocks: Sequence[tuple[float, int]] = (),
) -> Answer:
    """blocks: when, in seconds, and how many tokens; without them one token first, the others together."""
    first_s = ttft_ms / 1000
    if not blocks:
        blocks = [(first_s, 1), *([(first_s + seconds, len(token_ids) - 1)] if len(token_ids) > 1 else [])]
    return Answer(
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        block_times_s=[time_s for time_s, _ in blocks],
        block_tokens=[count for _, count in blocks],
        num_rounds=num_rounds,
        metrics=metrics,
    )


CASE = Case(phase=Phase(setup=SetUp.same_total_cores, batch_size=1), temperature=0.0)


def make_row(*answers: Answer, label: str = "x", set_name: str = "a", index: int = 0, repeat: int = 0) -> Row:
    return Row(case=CASE, set_name=set_name, index=index, label=label, repeat=repeat, answers=list(answers))


def make_metrics(**changes: object) -> RequestMetrics:
    return msgspec.structs.replace(METRICS, **changes)


Reply = Callable[[Question, int], Answer]
"""From a question and the number of the batch, warm-up included, to the answer; raises `WorkerLost`."""


class FakeWorker:
    """Answers what a function says; notes what was asked of whom in lists that all workers share."""

    def __init__(
        self, label: str, reply: Reply | str, asked: list[tuple[str, str]], batches: list[tuple[str, Batch]]
    ) -> None:
        """reply: a text instead of a function is the reason for being skipped."""
        self.label, self.reply, self.asked, self.batches = label, reply, asked, batches
        self.num_calls = 0
        self.is_closed = False

    def start(self, timeout_s: float) -> Ready | Skipped:
        if isinstance(self.reply, str):
            return Skipped(reason=self.reply)
        return Ready(given=f"fake {self.label}")

    def ask(self, batch: Batch, timeout_s: float) -> list[Answer]:
        assert not self.is_closed
        assert not isinstance(self.reply, str)
        self.num_calls += 1
        self.batches.append((self.label, batch))
        self.asked += [(self.label, question.text) for question in batch.questions]
        return [self.reply(question, self.num_calls) for question in batch.questions]

    def close(self) -> None:
        self.is_closed = True

    abandon = close


class FakeWorkers:
    """Opens a fake for each system of a plan."""

    def __init__(self, plan: Plan, replies: dict[str, Reply | str] | None = None) -> None:
        """replies: by label; the others all give the same answer."""
        self._plan = plan
        self._replies = replies or {}
        self.asked: list[tuple[str, str]] = []
        self.batches: list[tuple[str, Batch]] = []
        self.opened: list[FakeWorker] = []

    def __call__(self, spec: WorkerSpec) -> FakeWorker:
        (label,) = [system.label for system in self._plan.systems if _name(system.spec) == _name(spec)]
        reply = self._replies.get(label, lambda question, call: make_answer())
        self.opened.append(FakeWorker(label, reply, self.asked, self.batches))
        return self.opened[-1]


def _name(spec: WorkerSpec) -> object:
    """What tells the specifications of a fake plan apart."""
    return spec.name if isinstance(spec, PeerSpec) else spec.config.seed


def lost(reason: str, *, at_call: int) -> Reply:
    """Answers until that call, and is gone then."""

    def reply(question: Question, call: int) -> Answer:
        if call == at_call:
            raise WorkerLost(reason)
        return make_answer()

    return reply
