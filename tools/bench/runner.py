"""Runs a plan: starts a worker for each system, then asks them in turns, and writes every answer down.

A worker that fails, dies or takes too long is out; the others go on. Knows nothing about figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from tools.bench.journal import Journal, Row, Started
from tools.bench.plan import Plan, PlannedSystem
from tools.bench.protocol import Answer, Question, Ready, Skipped, WorkerSpec
from tools.bench.schedule import Turn, turns
from tools.bench.worker_process import WorkerLost, WorkerProcess
from tools.distill.progress import Progress, say

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


class Worker(Protocol):
    """What the runner needs of `WorkerProcess`."""

    def start(self, timeout_s: float) -> Ready | Skipped:
        """Load. Raises `WorkerLost`."""

    def ask(self, question: Question, timeout_s: float) -> Answer:
        """One answer. Raises `WorkerLost`."""

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
        self._outcomes = {system.label: Outcome(state=State.answered) for system in plan.systems}

    def run(self) -> dict[str, Outcome]:
        """Have everything answered that the journal lacks; how each system came through, by label."""
        all_turns = list(
            turns(
                [system.label for system in self._plan.systems],
                num_prompts=len(self._plan.prompts),
                repeats=self._plan.settings.repeats,
            )
        )
        due = [turn for turn in all_turns if self._key(turn) not in self._journal.rows]
        if len(due) < len(all_turns):
            say(f"{len(all_turns) - len(due)} of {len(all_turns)} answers are there already")
        try:
            for system in self._plan.systems:
                if any(turn.label == system.label for turn in due):
                    self._start(system)
            self._take_turns(due)
            for worker in self._workers.values():
                worker.close()
        except BaseException:
            for worker in self._workers.values():
                worker.abandon()
            raise
        return self._outcomes

    def _start(self, system: PlannedSystem) -> None:
        settings = self._plan.settings
        say(f"loading {system.label}")
        worker = self._workers[system.label] = self._open_worker(system.spec)
        try:
            reply = worker.start(settings.load_timeout_s)
            if isinstance(reply, Skipped):
                del self._workers[system.label]
                worker.close()
                self._outcomes[system.label] = Outcome(state=State.skipped, reason=reply.reason)
                say(f"{system.label} is skipped: {reply.reason}")
                return
            self._journal.add(Started(label=system.label, given=reply.given, source=self._source))
            question = self._plan.prompts[0].question
            few = min(_WARM_UP_TOKENS, question.max_tokens)
            worker.ask(msgspec.structs.replace(question, max_tokens=few), settings.answer_timeout_s)
        except WorkerLost as error:
            self._fail(system.label, str(error))

    def _take_turns(self, due: list[Turn]) -> None:
        progress = Progress("bench", "tokens")
        for number, turn in enumerate(due, start=1):
            if turn.label in self._workers:
                num_tokens = self._answer(turn)
                progress.add(num_tokens, share_done=number / len(due), note=f"answer {number} of {len(due)}")

    def _answer(self, turn: Turn) -> int:
        """Ask for one answer and write it down; how many tokens it has, 0 if the system is lost."""
        prompt = self._plan.prompts[turn.prompt]
        try:
            answer = self._workers[turn.label].ask(prompt.question, self._plan.settings.answer_timeout_s)
        except WorkerLost as error:
            self._fail(turn.label, f"at {prompt.set_name} {prompt.index}: {error}")
            return 0
        expected = len(prompt.question.prompt_token_ids)
        if answer.num_prompt_tokens != expected:
            self._fail(
                turn.label,
                f"at {prompt.set_name} {prompt.index}: it read {answer.num_prompt_tokens} prompt tokens, the "
                f"others {expected}",
            )
            return 0
        self._journal.add(
            Row(
                set_name=prompt.set_name,
                index=prompt.index,
                label=turn.label,
                repeat=turn.repeat,
                answer=answer,
            )
        )
        return len(answer.token_ids)

    def _fail(self, label: str, reason: str) -> None:
        self._outcomes[label] = Outcome(state=State.failed, reason=reason)
        say(f"{label} failed: {reason}")
        self._workers.pop(label).abandon()

    def _key(self, turn: Turn) -> tuple[str, int, str, int]:
        prompt = self._plan.prompts[turn.prompt]
        return prompt.set_name, prompt.index, turn.label, turn.repeat
