"""A load of mixed requests from many clients, and what an engine must look like after it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest

from pipeline.client import Client
from pipeline.errors import RequestError
from pipeline.messages import FinishReason, ProposalSource, Sampling
from tests.processes.runtime import traces, wait_until
from tests.processes.serving import ServingProcess

NUM_CLIENTS = 16
CLIENT_TIMEOUT_S = 120.0
MOST_GROWTH_BYTES = 16 << 20
"""Of the resident memory of all processes of an engine, in the second half; it was 0.4 MB for tiny models."""


@dataclass(frozen=True)
class Question:
    """A request, and what plain decoding answers."""

    prompt: str
    sampling: Sampling
    token_ids: list[int]
    text: str

    def options(self) -> dict[str, object]:
        """What is not as the engine has it."""
        given = msgspec.structs.asdict(self.sampling)
        defaults = msgspec.structs.asdict(Sampling(max_tokens=128, seed=-1))
        return {name: value for name, value in given.items() if value != defaults[name]}


def tree_of(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def open_files_of(pids: list[int]) -> Counter[str]:
    """How many files of each kind some processes hold: sockets, pipes, shared memory and so on, each by its
    process."""
    found: Counter[str] = Counter()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found[f"{pid} {os.readlink(entry).partition('[')[0]}"] += 1
    return found


def resident_bytes_of(pids: list[int]) -> int:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


class Asker:
    """One client's requests, of every kind; each asserts what must come of it."""

    def __init__(
        self, client: Client, questions: list[Question], seed: int, *, max_context: int = 96
    ) -> None:
        self.kinds: Counter[str] = Counter()
        self._client = client
        self._questions = questions
        self._max_context = max_context
        self._random = random.Random(seed)

    def ask(self, number: int) -> None:
        kinds = {
            "answer": 6,
            "blocks": 3,
            "leave": 2,
            "cancel": 2,
            "grammar": 1,
            "too_long": 1,
            "bad_option": 1,
        }
        kind = self._random.choices(list(kinds), weights=list(kinds.values()))[0]
        self.kinds[kind] += 1
        getattr(self, kind)(self._random.choice(self._questions), f"id-{number}")

    def answer(self, question: Question, name: str) -> None:
        answer = self._client.generate(question.prompt, request_id=name, **question.options())
        assert answer.token_ids == question.token_ids
        assert answer.text == question.text
        assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        logged = [] if question.sampling.logprobs is None else question.token_ids
        assert [entry.token_id for entry in answer.logprobs] == logged

    def blocks(self, question: Question, name: str) -> None:
        with self._client.stream(question.prompt, request_id=name, **question.options()) as stream:
            blocks = list(stream)
        assert "".join(block.text for block in blocks) == question.text
        assert [token_id for block in blocks for token_id in block.token_ids] == question.token_ids
        assert blocks[0].source is None
        # None where speculation rests.
        assert {block.source for block in blocks[1:]} <= {*ProposalSource, None}

    def leave(self, question: Question, name: str) -> None:
        for block in self._client.stream(question.prompt, request_id=name, **question.options()):
            assert question.token_ids[: block.num_tokens] == block.token_ids
            break

    def cancel(self, question: Question, name: str) -> None:
        options = {**question.options(), "max_tokens": 40}
        with self._client.stream(question.prompt, request_id=name, **options) as stream:
            if self._random.random() < 0.7:
                next(stream)
            stream.cancel()
            list(stream)
        answer, known = stream.answer, question.token_ids
        length = min(len(known), len(answer.token_ids))
        assert answer.token_ids[:length] == known[:length]

    def grammar(self, question: Question, name: str) -> None:
        regex = "[0-9]{2,4}(a|b)?"
        options = {"max_tokens": 20, "temperature": 1.0, "seed": question.sampling.seed}
        answer = self._client.generate(
            question.prompt, request_id=name, structured_outputs={"regex": regex}, **options
        )
        assert re.fullmatch(regex, answer.text)

    def too_long(self, question: Question, name: str) -> None:
        with pytest.raises(RequestError, match=f"the context holds {self._max_context}"):
            self._client.generate("x " * (self._max_context + 4), request_id=name)

    def bad_option(self, question: Question, name: str) -> None:
        with pytest.raises(RequestError, match="top_p: expected"):
            self._client.generate(question.prompt, request_id=name, top_p=7)


def ask_all(
    address: str, questions: list[Question], seeds: range, *, num_requests: int, max_context: int
) -> Counter[str]:
    """One client for each seed, all at once; how often each kind of request was made."""

    def ask(seed: int) -> Counter[str]:
        with Client(address, timeout_s=CLIENT_TIMEOUT_S) as client:
            asker = Asker(client, questions, seed, max_context=max_context)
            for number in range(num_requests):
                asker.ask(number)
            return asker.kinds

    with ThreadPoolExecutor(len(seeds)) as pool:
        return sum(pool.map(ask, seeds), Counter())


def check_thousand(
    serving: ServingProcess, questions: list[Question], *, num_requests: int, max_context: int
) -> None:
    """Sixteen clients ask an engine that has begun, twice `num_requests` each: every answer is right, and at
    the end it holds nothing that it did not hold before. The second time nothing may grow any more."""
    address = serving.wait_ready().address
    pids = tree_of(serving.process.pid)
    with Client(address) as client:
        Asker(client, questions, 0).blocks(questions[0], "warm-up")
    shared = traces(pids[0])
    ask = partial(ask_all, address, questions, num_requests=num_requests, max_context=max_context)
    kinds = ask(range(NUM_CLIENTS))
    memory, files = resident_bytes_of(pids), open_files_of(pids)
    kinds += ask(range(NUM_CLIENTS, 2 * NUM_CLIENTS))
    assert resident_bytes_of(pids) - memory < MOST_GROWTH_BYTES
    assert kinds.total() == 2 * NUM_CLIENTS * num_requests
    assert min(kinds.values()) > 20
    with Client(address, timeout_s=CLIENT_TIMEOUT_S) as client:
        wait_until(lambda: client.stats().num_running == 0)
        stats = client.stats()
        assert (stats.num_waiting, stats.num_clients) == (0, 0)
        assert stats.num_finished + stats.num_failed == kinds.total() + 1
        assert stats.cache_hits > 0
        # Whole contexts fit again, side by side: no page of a cancelled request is lost.
        with ThreadPoolExecutor(4) as pool:
            fill = lambda n: client.generate(  # noqa: E731
                questions[0].prompt, max_tokens=max_context - 20, temperature=1.0, seed=n
            )
            for answer in pool.map(fill, range(4)):
                assert answer.token_ids
                assert answer.metrics is not None
                assert answer.metrics.num_preemptions == 0
    wait_until(
        lambda: open_files_of(pids) <= files, what=lambda: f"more files: {open_files_of(pids) - files}"
    )
    assert tree_of(serving.process.pid) == pids
    assert traces(pids[0]) == shared
    serving.process.send_signal(signal.SIGINT)
    assert serving.wait() == 130
    assert "Traceback" not in serving.stderr
    assert traces(serving.process.pid) == set()
