"""Engines with real stages and tiny models in float64: many clients, every answer that of plain decoding."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from pipeline.client import Client
from pipeline.errors import EngineDead, RequestError
from pipeline.messages import Sampling
from tests.processes.client_load import Asker, Question, check_thousand, tree_of
from tests.processes.runtime import traces
from tests.processes.serving import START_S, ServingProcess
from tests.tiny_folder import TinyFolder, save_tiny_folder

PROMPTS = ["hello world", "The quick brown fox", "def add(a, b):", "東京と大阪", "naïve café 🌵", "a"]
OPTIONS = [
    {},
    {"presence_penalty": 1.2, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "max_tokens": 16},
    {"logit_bias": {70: 6.0, 80: 5.0, 5: -100.0}, "stop_token_ids": [70], "min_tokens": 3, "max_tokens": 10},
    {"min_p": 0.05, "top_k": 20, "echo": True},
    {"logprobs": 2},
    {"ignore_eos": True, "repetition_penalty": 0.8, "logprobs": 0, "presence_penalty": -0.5},
    {},
]


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


@pytest.fixture(scope="module")
def questions(tiny: TinyFolder) -> list[Question]:
    found = []
    for seed, prompt in enumerate(PROMPTS * 5):
        sampling = Sampling(
            max_tokens=1 + seed % 13,
            temperature=[0.0, 0.7, 1.0][seed % 3],
            top_p=[1.0, 0.9][seed % 2],
            seed=seed,
        )
        sampling = msgspec.structs.replace(sampling, **OPTIONS[seed % len(OPTIONS)])
        token_ids, text = tiny.answer(prompt, sampling)
        if seed % 4 == 3 and len(text) > 4:  # an end that most answers have somewhere, maybe between blocks
            sampling = msgspec.structs.replace(sampling, stop=[text[-3:], "never"])
            token_ids, text = tiny.answer(prompt, sampling)
        found.append(Question(prompt, sampling, token_ids, text))
    return found


def test_a_thousand_mixed_requests_of_sixteen_clients(
    tiny: TinyFolder, questions: list[Question], tmp_path: Path
) -> None:
    with serve(tiny, f"ipc://{tmp_path}/s", "max_requests=4") as serving:
        check_thousand(serving, questions, num_requests=32, max_context=96)
    assert list(tmp_path.iterdir()) == []


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
    token_ids = tiny.tokenizer.encode(PROMPTS[1]).ids
    from_ids = client.generate({"prompt_token_ids": token_ids}, max_tokens=12, temperature=1.0, seed=3)
    assert from_ids.token_ids == plain.token_ids
    assert from_ids.num_prompt_tokens == len(token_ids)
    assert from_ids.prompt_token_ids == plain.prompt_token_ids == token_ids
    with pytest.raises(RequestError, match=r"expected a token id of the model's tokenizer, .* got 1000"):
        client.generate({"prompt_token_ids": [1000]})
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
                    Asker(client, questions, 0).answer(question, f"id-{number}")
            stream = one.stream(PROMPTS[0], max_tokens=90, temperature=1.0, seed=1)
            next(stream)
            _, *stages = tree_of(first.process.pid)
            os.kill(stages[2], signal.SIGKILL)
            with pytest.raises(
                EngineDead, match=r"ended: stage lost: [a-z-]+ \(pid \d+\) was killed by SIGKILL"
            ):
                list(stream)
            assert first.wait() == 1
            Asker(two, questions, 0).blocks(questions[0], "still")
            check_options(two, tiny)
        assert traces(first.process.pid) == set()
