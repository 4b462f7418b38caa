"""Engines with real stages and tiny models in float64: many clients, every answer that of plain decoding."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.client import Client
from pipeline.errors import EngineDead, RequestError
from pipeline.messages import FinishReason, ProposalSource, Sampling
from tests.processes.runtime import traces, wait_until
from tests.processes.serving import START_S, ServingProcess
from tests.tiny_folder import TinyFolder, save_tiny_folder

NUM_CLIENTS = 16
NUM_REQUESTS = 30
"""Of each client, twice: the second time nothing may grow any more."""
MOST_GROWTH_BYTES = 16 << 20
"""Of the resident memory of all processes of an engine, in the second half; it was 0.4 MB."""
PROMPTS = ["hello world", "The quick brown fox", "def add(a, b):", "東京と大阪", "naïve café 🌵", "a"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def serve(tiny: TinyFolder, listen: str, *arguments: str) -> ServingProcess:
    """Start an engine whose draft is the target: what it proposes is often right."""
    return ServingProcess(
        f"listen={listen}",
        f"model.path={tiny.folder}",
        f"speculation.draft.path={tiny.folder}",
        "model.dtype=float64",
        "model.max_context=96",
        "speculation.depth=3",
        "speculation.budget=6",
        *arguments,
    )


@dataclass(frozen=True)
class Question:
    """A request, and what plain decoding answers."""

    prompt: str
    sampling: Sampling
    token_ids: list[int]
    text: str

    def options(self) -> dict[str, object]:
        return {name: getattr(self.sampling, name) for name in ("max_tokens", "temperature", "seed", "top_p")}


@pytest.fixture(scope="module")
def questions(tiny: TinyFolder) -> list[Question]:
    found = []
    for seed, prompt in enumerate(PROMPTS * 4):
        sampling = Sampling(
            max_tokens=1 + seed % 7,
            temperature=[0.0, 0.7, 1.0][seed % 3],
            top_p=[1.0, 0.9][seed % 2],
            seed=seed,
        )
        token_ids = tiny.expected(prompt, sampling)
        found.append(Question(prompt, sampling, token_ids, tiny.text(token_ids)))
    return found


def tree_of(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def open_files_of(pids: list[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def resident_bytes_of(pids: list[int]) -> int:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


class Asker:
    """One client's requests, of every kind; each asserts what must come of it."""

    def __init__(self, client: Client, questions: list[Question], seed: int) -> None:
        self.kinds: Counter[str] = Counter()
        self._client = client
        self._questions = questions
        self._random = random.Random(seed)

    def ask(self, number: int) -> None:
        kinds = {"answer": 6, "blocks": 3, "leave": 2, "cancel": 2, "too_long": 1, "bad_option": 1}
        kind = self._random.choices(list(kinds), weights=list(kinds.values()))[0]
        self.kinds[kind] += 1
        getattr(self, f"_{kind}")(self._random.choice(self._questions), f"id-{number}")

    def _answer(self, question: Question, name: str) -> None:
        answer = self._client.generate(question.prompt, request_id=name, **question.options())
        assert answer.token_ids == question.token_ids
        assert answer.text == question.text
        assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)

    def _blocks(self, question: Question, name: str) -> None:
        with self._client.stream(question.prompt, request_id=name, **question.options()) as stream:
            blocks = list(stream)
        assert "".join(block.text for block in blocks) == question.text
        assert [token_id for block in blocks for token_id in block.token_ids] == question.token_ids
        assert blocks[0].source is None
        # None where speculation rests.
        assert {block.source for block in blocks[1:]} <= {*ProposalSource, None}

    def _leave(self, question: Question, name: str) -> None:
        for block in self._client.stream(question.prompt, request_id=name, **question.options()):
            assert question.token_ids[: block.num_tokens] == block.token_ids
            break

    def _cancel(self, question: Question, name: str) -> None:
        options = {**question.options(), "max_tokens": 40}
        with self._client.stream(question.prompt, request_id=name, **options) as stream:
            if self._random.random() < 0.7:
                next(stream)
            stream.cancel()
            list(stream)
        answer, known = stream.answer, question.token_ids
        length = min(len(known), len(answer.token_ids))
        assert answer.token_ids[:length] == known[:length]

    def _too_long(self, question: Question, name: str) -> None:
        with pytest.raises(RequestError, match="the context holds 96"):
            self._client.generate("x " * 100, request_id=name)

    def _bad_option(self, question: Question, name: str) -> None:
        with pytest.raises(RequestError, match="top_p: expected"):
            self._client.generate(question.prompt, request_id=name, top_p=7)


def ask_all(address: str, questions: list[Question], seeds: range) -> Counter[str]:
    """One client for each seed, all at once; how often each kind of request was made."""

    def ask(seed: int) -> Counter[str]:
        with Client(address, timeout_s=120) as client:
            asker = Asker(client, questions, seed)
            for number in range(NUM_REQUESTS):
                asker.ask(number)
            return asker.kinds

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return sum(pool.map(ask, seeds), Counter())


def test_a_thousand_mixed_requests_of_sixteen_clients(
    tiny: TinyFolder, questions: list[Question], tmp_path: Path
) -> None:
    with serve(tiny, f"ipc://{tmp_path}/s", "max_requests=4") as serving:
        address = serving.wait_ready().address
        pids = tree_of(serving.process.pid)
        with Client(address) as client:
            Asker(client, questions, 0)._blocks(questions[0], "warm-up")
        files, shared = open_files_of(pids), traces(pids[0])
        kinds = ask_all(address, questions, range(NUM_CLIENTS))
        memory = resident_bytes_of(pids)
        kinds += ask_all(address, questions, range(NUM_CLIENTS, 2 * NUM_CLIENTS))
        assert resident_bytes_of(pids) - memory < MOST_GROWTH_BYTES
        assert kinds.total() == 2 * NUM_CLIENTS * NUM_REQUESTS
        assert min(kinds.values()) > 20
        with Client(address, timeout_s=120) as client:
            wait_until(lambda: client.stats().num_running == 0)
            stats = client.stats()
            assert (stats.num_waiting, stats.num_clients) == (0, 0)
            assert stats.num_finished + stats.num_failed == kinds.total() + 1
            assert stats.cache_hits > 0
            # Whole contexts fit again, side by side: no page of a cancelled request is lost.
            with ThreadPoolExecutor(4) as pool:
                ask = lambda n: client.generate(PROMPTS[0], max_tokens=90, temperature=1.0, seed=n)  # noqa: E731
                assert all(answer.token_ids for answer in pool.map(ask, range(4)))
        wait_until(lambda: open_files_of(pids) <= files)
        assert tree_of(serving.process.pid) == pids
        assert traces(pids[0]) == shared
        serving.process.send_signal(signal.SIGINT)
        assert serving.wait() == 130
        assert "Traceback" not in serving.stderr
    assert list(tmp_path.iterdir()) == []
    assert traces(serving.process.pid) == set()


def check_options(client: Client, tiny: TinyFolder) -> None:
    """Options of a request reach the stages, and what they give the client."""
    plain = client.generate(PROMPTS[1], max_tokens=12, temperature=1.0, seed=3)
    with_logprobs = client.generate(PROMPTS[1], max_tokens=12, temperature=1.0, seed=3, logprobs=2)
    assert with_logprobs.token_ids == [entry.token_id for entry in with_logprobs.logprobs] == plain.token_ids
    assert plain.logprobs == []
    banned = {plain.token_ids[0]: -100.0}
    assert (
        client.generate(PROMPTS[1], max_tokens=12, seed=3, temperature=1.0, logit_bias=banned).token_ids[0]
        != (plain.token_ids[0])
    )
    stop = plain.text[4:6]
    with client.stream(PROMPTS[1], max_tokens=12, temperature=1.0, seed=3, stop=stop) as stream:
        text = "".join(block.text for block in stream)
    assert text == stream.answer.text == plain.text[: plain.text.index(stop)]
    assert stream.answer.stop_reason == stop


def test_two_engines_started_at_once_both_serve_and_one_outlives_the_other(
    tiny: TinyFolder, questions: list[Question], tmp_path: Path
) -> None:
    addresses = [f"ipc://{tmp_path}/first", "tcp://127.0.0.1:*"]
    with serve(tiny, addresses[0]) as first, serve(tiny, addresses[1]) as second:
        # The first client comes while the models are loaded, and waits for them.
        with (
            Client(addresses[0], connect_timeout_s=START_S) as one,
            Client(second.wait_ready().address) as two,
        ):
            for number, question in enumerate(questions[:6]):
                for client in (one, two):
                    Asker(client, questions, 0)._answer(question, f"id-{number}")
            stream = one.stream(PROMPTS[0], max_tokens=90, temperature=1.0, seed=1)
            next(stream)
            _, *stages = tree_of(first.process.pid)
            os.kill(stages[2], signal.SIGKILL)
            with pytest.raises(
                EngineDead, match=r"ended: stage lost: [a-z-]+ \(pid \d+\) was killed by SIGKILL"
            ):
                list(stream)
            assert first.wait() == 1
            Asker(two, questions, 0)._blocks(questions[0], "still")
            check_options(two, tiny)
        assert traces(first.process.pid) == set()
