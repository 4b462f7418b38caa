"""The step `write`: the target answers prompts in a full batch, and shards of what it wrote are kept.

A row that is done is given the next prompt, so that the batch stays full; prompts of similar length are
taken one after another, so that rows need about the same room. Going through all the prompts is a round:
later rounds answer the same prompts at other temperatures. A killed run loses the answers under way and
those of the last unwritten shard.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stages.model.weights import LoadedModel, load_model
from tools.distill.batch_decoder import BatchDecoder
from tools.distill.prompts import Prompt, PromptBook
from tools.distill.repetition import loop_start
from tools.distill.runner_decoder import RunnerDecoder
from tools.distill.sampler import Choice, Sampler
from tools.distill.settings import DistillSettings
from tools.distill.shards import Answer, read_done, write_shard
from tools.progress import Progress, say

_SHARD_TOKENS = 40_000
"""Answer tokens in a shard: about 4 MB with 16 probabilities a position."""
_WINDOW = 768
"""Prompts sorted by length at a time."""
_TEMPERATURES = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.0)
_LOOP_CHECK_EVERY = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt to answer once."""

    prompt: Prompt
    round_index: int
    temperature: float
    max_tokens: int
    stop_ids: frozenset[int]


@dataclass(slots=True)
class _Row:
    job: Job
    tokens: list[int] = field(default_factory=list)


class BatchWriter:
    """Keeps the rows of a decoder busy with jobs."""

    def __init__(
        self, model: LoadedModel, *, num_rows: int, num_slots: int, top_tokens: int, seed: int, device: str
    ) -> None:
        self._decoder: BatchDecoder | RunnerDecoder
        if device == "cpu":
            self._decoder = RunnerDecoder(model, num_rows=num_rows, num_slots=num_slots)
        else:
            self._decoder = BatchDecoder(model, num_rows=num_rows, num_slots=num_slots, device=device)
        self._sampler = Sampler(seed=seed, top_tokens=top_tokens, device=device)
        self._device = device
        self._num_slots = num_slots
        self._rows: list[_Row | None] = [None] * num_rows
        self._lengths = torch.zeros(num_rows, dtype=torch.int64)
        self._tokens = torch.zeros(num_rows, dtype=torch.int64)
        self._temperatures = torch.zeros(num_rows)
        # The answers' own part of the slots: [rows, slots, k].
        self._top_ids = torch.zeros(num_rows, num_slots, top_tokens, dtype=torch.int32)
        self._top_logprobs = torch.zeros(num_rows, num_slots, top_tokens, dtype=torch.float16)
        self._refill = max(num_rows // 8, 1)
        self.num_looped = 0

    def run(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        """Answers as they are finished; ends when the jobs do and all rows are done."""
        waiting: Job | None = next(jobs, None)
        while True:
            free = [index for index, row in enumerate(self._rows) if row is None]
            if waiting is not None and len(free) >= self._refill:
                admitted: list[Job] = []
                while waiting is not None and len(admitted) < len(free):
                    admitted.append(waiting)
                    waiting = next(jobs, None)
                yield from self._admit(admitted, free[: len(admitted)])
            elif len(free) == len(self._rows):
                return
            else:
                yield from self._step()

    def _admit(self, jobs: list[Job], rows: list[int]) -> Iterator[Answer]:
        owners: dict[int, int] = {}
        prompts: list[tuple[int, ...]] = []
        owner: list[int] = []
        for job in jobs:
            if job.prompt.key not in owners:
                owners[job.prompt.key] = len(prompts)
                prompts.append(job.prompt.token_ids)
            owner.append(owners[job.prompt.key])
        logits = self._decoder.read(prompts, rows, owner)
        for row, job in zip(rows, jobs, strict=True):
            self._rows[row] = _Row(job)
            self._lengths[row] = len(job.prompt.token_ids)
            self._temperatures[row] = job.temperature
        choice = self._sampler.choose(logits, self._temperatures[rows].to(self._device))
        yield from self._take(choice, rows)

    def _step(self) -> Iterator[Answer]:
        logits = self._decoder.step(self._tokens, self._lengths)
        active = [index for index, row in enumerate(self._rows) if row is not None]
        self._lengths[active] += 1
        if len(active) < len(self._rows):
            logits = logits[torch.tensor(active, device=logits.device)]
        yield from self._take(
            self._sampler.choose(logits, self._temperatures[active].to(self._device)), active
        )

    def _take(self, choice: Choice, rows: list[int]) -> Iterator[Answer]:
        """Note what was chosen for `rows`, and hand out the rows that are done."""
        tokens = choice.token_ids.tolist()
        index = torch.tensor(rows)
        places = torch.tensor([len(self._row(row).tokens) for row in rows])
        self._top_ids[index, places] = choice.top_ids.cpu()
        self._top_logprobs[index, places] = choice.top_logprobs.cpu()
        self._tokens[index] = choice.token_ids.cpu()
        for row_index, token in zip(rows, tokens, strict=True):
            row = self._row(row_index)
            row.tokens.append(token)
            count = len(row.tokens)
            is_done = (
                token in row.job.stop_ids
                or count >= row.job.max_tokens
                or len(row.job.prompt.token_ids) + count >= self._num_slots
            )
            cut = None
            if is_done or count % _LOOP_CHECK_EVERY == 0:
                cut = loop_start(row.tokens)
                self.num_looped += cut is not None
            if is_done or cut is not None:
                yield self._release(row_index, count if cut is None else cut)

    def _row(self, index: int) -> _Row:
        row = self._rows[index]
        assert row is not None, f"row {index} holds no answer"
        return row

    def _release(self, index: int, count: int) -> Answer:
        row = self._row(index)
        self._rows[index] = None
        self._lengths[index] = 0  # an idle row goes through the motions at the cheapest length
        return Answer(
            key=row.job.prompt.key,
            round_index=row.job.round_index,
            source=row.job.prompt.source,
            temperature=row.job.temperature,
            prompt_ids=torch.tensor(row.job.prompt.token_ids, dtype=torch.int32),
            answer_ids=torch.tensor(row.tokens[:count], dtype=torch.int32),
            top_ids=self._top_ids[index, :count].clone(),
            top_logprobs=self._top_logprobs[index, :count].clone(),
        )


def write(settings: DistillSettings, target_folder: Path, work: Path) -> None:
    """Fill `work/answers` up to the budgets. Raises `ConfigError`."""
    model = load_model(target_folder, dtype=torch.bfloat16)
    book = PromptBook(target_folder, max_tokens=settings.max_prompt_tokens)
    folder = work / "answers"
    done, num_before = read_done(folder)
    writer = BatchWriter(
        model,
        num_rows=settings.batch_rows,
        num_slots=settings.max_prompt_tokens + settings.max_answer_tokens,
        top_tokens=settings.top_tokens,
        seed=settings.seed * 1_000_003 + num_before,  # a resumed run must not repeat the draws of the first
        device=settings.device,
    )
    prompts = book.all_prompts(settings, invent=lambda turns: _invent(settings, book, writer, turns, work))
    say(f"{len(prompts):,} prompts; {num_before:,} answer tokens are there already")
    progress = Progress("write", "answer tokens")
    start = time.monotonic()
    total = num_before
    unwritten: list[Answer] = []
    num_unwritten = 0

    def share_done() -> float:
        by_time = (time.monotonic() - start) / (settings.write_minutes * 60)
        return min(max(by_time, total / settings.write_tokens), 1.0)

    def flush() -> None:
        nonlocal num_unwritten
        if unwritten:
            write_shard(folder, unwritten)
        unwritten.clear()
        num_unwritten = 0

    stop_ids = frozenset(model.eos_token_ids)
    jobs = _jobs(settings, prompts, done, stop_ids, lambda: share_done() >= 1.0)
    try:
        for answer in writer.run(jobs):
            count = len(answer.answer_ids)
            if count:
                unwritten.append(answer)
                total += count
                num_unwritten += count
            progress.add(count, share_done=share_done(), note=f"{writer.num_looped} loops cut")
            if num_unwritten >= _SHARD_TOKENS:
                flush()
    finally:
        flush()
        progress.close()
    progress.report(share_done=share_done())


def _jobs(
    settings: DistillSettings,
    prompts: Sequence[Prompt],
    done: set[tuple[int, int]],
    stop_ids: frozenset[int],
    is_over: Callable[[], bool],
) -> Iterator[Job]:
    """Endless rounds over the prompts, each answered greedily and warm in the first round, warm later."""
    round_index = 0
    while True:
        draw = random.Random(f"{settings.seed} {round_index}")
        order = list(prompts)
        draw.shuffle(order)
        for start in range(0, len(order), _WINDOW):
            for prompt in sorted(order[start : start + _WINDOW], key=lambda p: len(p.token_ids)):
                is_greedy = round_index == 0 and draw.random() < settings.greedy_share
                temperature = 0.0 if is_greedy else draw.choice(_TEMPERATURES)
                if is_over():
                    return
                if (prompt.key, round_index) not in done:
                    yield Job(
                        prompt=prompt,
                        round_index=round_index,
                        temperature=temperature,
                        max_tokens=settings.max_answer_tokens,
                        stop_ids=stop_ids,
                    )
        round_index += 1


def _invent(
    settings: DistillSettings, book: PromptBook, writer: BatchWriter, openings: Sequence[Prompt], work: Path
) -> list[list[int]]:
    """Let the target write user turns; token ids of each, without the end of the turn."""
    progress = Progress("invent", "turns")
    turns: list[list[int]] = []

    def jobs() -> Iterator[Job]:
        for opening in openings:
            yield Job(
                prompt=opening, round_index=0, temperature=0.9, max_tokens=80, stop_ids=book.end_of_turn_ids
            )

    for answer in writer.run(jobs()):
        ids = answer.answer_ids.tolist()
        if ids and ids[-1] in book.end_of_turn_ids:
            turns.append([*answer.prompt_ids.tolist()[book.num_turn_prefix :], *ids[:-1]])
        progress.add(1, share_done=(len(turns) + 1) / len(openings))
    progress.close()
    return turns
