"""The demo model under load, once: `make test-full`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.client import Client
from pipeline.messages import Sampling
from tests.processes.client_load import Question, check_thousand
from tests.processes.serving import ServingProcess

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def add(a, b):",
    "naïve café 🌵",
    "1, 2, 3,",
    "Q:",
]
MAX_CONTEXT = 160

pytestmark = [pytest.mark.demo, pytest.mark.full, pytest.mark.timeout(3600)]


def _serve(run: str, folder: Path, *arguments: str) -> ServingProcess:
    # float32: what a row computes does not depend on its batch closely enough to change a token here.
    return ServingProcess(
        f"conf={run}",
        f"listen=ipc://{folder}/{run}",
        "model.dtype=float32",
        f"model.max_context={MAX_CONTEXT}",
        *arguments,
    )


def _questions(folder: Path) -> list[Question]:
    """With the answers of plain decoding, one after the other."""
    found = []
    with _serve("autoregressive", folder) as serving, Client(serving.wait_ready().address) as client:
        for seed, prompt in enumerate(PROMPTS * 4):
            sampling = Sampling(
                max_tokens=1 + seed % 17,
                temperature=[0.0, 0.7, 1.0][seed % 3],
                top_p=[1.0, 0.9][seed % 2],
                seed=seed,
            )
            answer = client.generate(
                prompt,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=seed,
            )
            found.append(Question(prompt, sampling, answer.token_ids, answer.text))
    return found


@pytest.mark.parametrize("run", ["saguaro", "saguaro_tree"])
def test_a_thousand_mixed_requests_of_sixteen_clients(run: str, tmp_path: Path) -> None:
    questions = _questions(tmp_path)
    with _serve(run, tmp_path, "max_requests=4") as serving:
        check_thousand(serving, questions, num_requests=32, max_context=MAX_CONTEXT)
