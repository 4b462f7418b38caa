"""Runs a plan: starts a worker for each system, asks them in turns, and writes every answer down.

Each repeat has workers of its own.

A worker that fails, dies or takes too long is out; the others go on. Knows nothing about figures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Protocol

import msgspec

from tools.bench.cases import Case, Phase
from tools.bench.journal import Journal, Row, RowKey, Started
from tools.bench.plan import Plan, PlannedSystem
from tools.bench.protocol import Answer, Batch, Ready, Skipped, WorkerSpec
from tools.bench.schedule import Turn, turns
from tools.bench.worker_process import WorkerLost, WorkerProcess
from tools.progress import Progress, say

_WARM_UP_TOKENS = 16
"""Of an answer that is thrown away: first calls allocate, compile and fault pages in."""


class State(str, Enum):
    """How a system came through."""

    answered = "answered"
    skipped = "skipped"
    """It cannot run here."""
    failed = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a system came through, and why not."""

    state: State
    reason: str = ""


Outcomes = dict[tuple[Phase, str], Outcome]
"""By phase and label."""


class Worker(Protocol):
    """What the runner needs of `WorkerProcess`."""

    def start(self, timeout_s: float) -> Ready | Skipped:
        """Load. Raises `WorkerLost`."""

    def ask(self, batch: Batch, timeout_s: float) -> list[Answer]:
        """The answers to a batch. Raises `WorkerLost`."""

    def close(self) -> None:
        """End it."""

    def abandon(self) -> None:
        """End it at once."""


class Runner:
    """One run of a plan."""

    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        *,
        source: str,
        open_worker: Callable[[WorkerSpec], Worker] = WorkerProcess,
    ) -> None:
        """source: digest of the engine's source, noted with every start."""
        self._plan = plan
        self._journal = journal
        self._source = source
        self._open_worker = open_worker
        self._workers: dict[str, Worker] = {}
        self._outcomes: Outcomes = {}
        self._not_here: dict[str, str] = {}
        """Labels of systems that cannot run on this machine, with the reason."""

    def run(self) -> Outcomes:
        """Have everything answered that the journal lacks; how each system came through."""
        turns_by_phase = {phase: self._turns(phase) for phase in self._plan.phases}
        due_by_phase = {
            phase: [turn for turn in listed if self._key(phase, turn) not in self._journal.rows]
            for phase, listed in turns_by_phase.items()
        }
        num_turns = sum(map(len, turns_by_phase.values()))
        num_due = sum(map(len, due_by_phase.values()))
        if num_due < num_turns:
            say(f"{num_turns - num_due} of {num_turns} answers are there already")
        with contextlib.closing(_Counter(num_due)) as counter:
            for phase, due in due_by_phase.items():
                self._run_phase(phase, due, counter)
        return self._outcomes

    def _run_phase(self, phase: Phase, due: Sequence[Turn], counter: _Counter) -> None:
        for system in self._plan.systems:
            outcome = Outcome(state=State.answered)
            if system not in self._plan.systems_in(phase):
                outcome = Outcome(state=State.skipped, reason="it is asked one request at a time only")
            self._outcomes[phase, system.label] = outcome
        for repeat, listed in groupby(due, key=lambda turn: turn.repeat):
            say(str(phase) if self._plan.settings.repeats == 1 else f"{phase}, repeat {repeat + 1}")
            self._run_repeat(phase, list(listed), counter)

    def _run_repeat(self, phase: Phase, due: Sequence[Turn], counter: _Counter) -> None:
        """Have one repeat answered, by workers of its own.

        What memory a process happens to get can make it a tenth faster or slower for all its life, so one
        start of each system would be one observation of it, however many prompts it answers.
        """
        try:
            for system in self._plan.systems:
                is_in = self._outcomes[phase, system.label].state is State.answered
                if is_in and any(turn.label == system.label for turn in due):
                    self._start(phase, system)
            for turn in due:
                counter.add(self._answer(phase, turn) if turn.label in self._workers else 0)
            for worker in self._workers.values():
                worker.close()
        except BaseException:
            for worker in self._workers.values():
                worker.abandon()
            raise
        self._workers.clear()

    def _turns(self, phase: Phase) -> list[Turn]:
        labels = [system.label for system in self._plan.systems_in(phase)]
        return list(
            turns(
                labels,
                temperatures=self._plan.settings.temperature_list,
                num_groups=len(self._plan.groups(phase.batch_size)),
                repeats=self._plan.settings.repeats,
            )
        )

    def _start(self, phase: Phase, system: PlannedSystem) -> None:
        if system.label in self._not_here:
            self._skip(phase, system.label)
            return
        settings = self._plan.settings
        say(f"loading {system.label}")
        worker = self._workers[system.label] = self._open_worker(system.spec_for(phase))
        try:
            reply = worker.start(settings.load_timeout_s)
            if isinstance(reply, Skipped):
                del self._workers[system.label]
                worker.close()
                self._not_here[system.label] = reply.reason
                self._skip(phase, system.label)
                return
            self._journal.add(
                Started(label=system.label, phase=phase, given=reply.given, source=self._source)
            )
            worker.ask(self._warm_up(phase), settings.answer_timeout_s)
        except WorkerLost as error:
            self._fail(phase, system.label, str(error))

    def _warm_up(self, phase: Phase) -> Batch:
        return Batch(
            questions=[
                msgspec.structs.replace(
                    prompt.question, max_tokens=min(_WARM_UP_TOKENS, prompt.question.max_tokens)
                )
                for prompt in self._plan.groups(phase.batch_size)[0]
            ],
            temperature=self._plan.settings.temperature_list[0],
        )

    def _answer(self, phase: Phase, turn: Turn) -> int:
        """Ask for the answers to a batch and write them down; how many tokens, 0 if the system is lost."""
        prompts = self._plan.groups(phase.batch_size)[turn.group]
        where = f"at {prompts[0].set_name} {prompts[0].index}"
        batch = Batch(questions=[prompt.question for prompt in prompts], temperature=turn.temperature)
        try:
            answers = self._workers[turn.label].ask(batch, self._plan.settings.answer_timeout_s)
        except WorkerLost as error:
            self._fail(phase, turn.label, f"{where}: {error}")
            return 0
        for answer, question in zip(answers, batch.questions, strict=True):
            expected = len(question.prompt_token_ids)
            if answer.num_prompt_tokens != expected:
                reason = f"it read {answer.num_prompt_tokens} prompt tokens, the others {expected}"
                self._fail(phase, turn.label, f"{where}: {reason}")
                return 0
        case, set_name, index, label, repeat = self._key(phase, turn)
        self._journal.add(
            Row(case=case, set_name=set_name, index=index, label=label, repeat=repeat, answers=answers)
        )
        return sum(len(answer.token_ids) for answer in answers)

    def _skip(self, phase: Phase, label: str) -> None:
        reason = self._not_here[label]
        self._outcomes[phase, label] = Outcome(state=State.skipped, reason=reason)
        say(f"{label} is skipped: {reason}")

    def _fail(self, phase: Phase, label: str, reason: str) -> None:
        self._outcomes[phase, label] = Outcome(state=State.failed, reason=reason)
        say(f"{label} failed: {reason}")
        self._workers.pop(label).abandon()

    def _key(self, phase: Phase, turn: Turn) -> RowKey:
        first = self._plan.groups(phase.batch_size)[turn.group][0]
        case = Case(phase=phase, temperature=turn.temperature)
        return case, first.set_name, first.index, turn.label, turn.repeat


class _Counter:
    """Shows how far the run is."""

    def __init__(self, num_due: int) -> None:
        self._progress = Progress("bench", "tokens")
        self._num_due = num_due
        self._num_done = 0

    def add(self, num_tokens: int) -> None:
        self._num_done += 1
        self._progress.add(
            num_tokens,
            share_done=self._num_done / self._num_due,
            note=f"{self._num_done} of {self._num_due}",
        )

    def close(self) -> None:
        self._progress.close()
