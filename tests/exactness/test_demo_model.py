"""On the real model, in real processes: every system returns the same tokens, in float32 and in bfloat16.

The command line runs each system on the same prompts; in float32 at temperature 0 the tokens are those of
`transformers.generate` too. A small cut runs on every commit, all of it in `make test-full`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.model.linear import has_packed_bfloat16
from tests.native import REASON

PROMPTS = Path(__file__).with_name("demo_prompts.txt")
CHAINS = {
    "autoregressive": ("conf=autoregressive",),
    "speculative": ("conf=speculative",),
    "ssd": ("conf=ssd",),
    "saguaro": ("conf=saguaro",),
    "saguaro, look-up": ("conf=saguaro", "speculation.draft.kind=ngram"),
    "saguaro, three at once": ("conf=saguaro", "max_requests=3"),
}
TREES = {
    "tree": ("conf=tree",),
    "tree, fixed widths": ("conf=tree", "speculation.tree.widths=[3,2,1]"),
    "saguaro_tree": ("conf=saguaro_tree",),
    "saguaro_tree, three at once": ("conf=saguaro_tree", "max_requests=3"),
}
SIZES = [
    pytest.param(4, 32, id="cut"),
    pytest.param(20, 64, id="full", marks=pytest.mark.full),
]
pytestmark = [pytest.mark.demo, pytest.mark.timeout(3600)]


def _rows(folder: Path, name: str, arguments: tuple[str, ...], prompts: Path) -> list[dict[str, Any]]:
    """One answer a prompt, from one call of the command line."""
    output = folder / f"{name}.jsonl"
    command = [
        sys.executable,
        "-m",
        "pipeline.run",
        *arguments,
        f"prompts_file={prompts}",
        f"output={output}",
    ]
    done = subprocess.run(
        [*command, "seed=1234"],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    rows.sort(key=lambda row: int(row["request_id"]))
    return rows


def _answers(folder: Path, name: str, arguments: tuple[str, ...], prompts: Path) -> list[list[int]]:
    return [row["token_ids"] for row in _rows(folder, name, arguments, prompts)]


def _transformers_answers(prompts: Path, max_tokens: int) -> list[list[int]]:
    import torch
    import transformers

    from stages.model.source import resolve

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder = resolve(None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for line in prompts.read_text().splitlines():
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": line}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        out = model.generate(ids, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.parametrize(("num_prompts", "max_tokens"), SIZES)
def test_systems_and_transformers_agree_when_greedy(
    num_prompts: int, max_tokens: int, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS.read_text().splitlines()[:num_prompts]))
    expected = _transformers_answers(prompts, max_tokens)
    for name, arguments in (CHAINS | TREES).items():
        run = (*arguments, f"max_tokens={max_tokens}", "temperature=0", "model.dtype=float32")
        assert _answers(tmp_path, name, run, prompts) == expected, name


@pytest.mark.parametrize(("num_prompts", "max_tokens"), SIZES)
@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 1), ("bfloat16", 0), ("bfloat16", 1)])
def test_systems_agree(
    num_prompts: int, max_tokens: int, dtype: str, temperature: int, tmp_path: Path
) -> None:
    systems = CHAINS | TREES
    if dtype == "bfloat16" and REASON:
        if not has_packed_bfloat16():
            pytest.skip("rows are independent of one another only in the C kernels and in oneDNN's products")
        systems = CHAINS  # a node's ancestors lie apart, which PyTorch's attention sums in another order
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS.read_text().splitlines()[:num_prompts]))
    expected: list[list[int]] | None = None
    for name, arguments in systems.items():
        run = (*arguments, f"max_tokens={max_tokens}", f"temperature={temperature}", f"model.dtype={dtype}")
        answers = _answers(tmp_path, name, run, prompts)
        expected = expected or answers
        assert answers == expected, name


def test_the_draft_computes_while_the_target_verifies(tmp_path: Path) -> None:
    """The overlap is what the pipeline is for."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Count from one to ten.\nName three rivers.")
    run = ("conf=saguaro", "speculation.plan=fixed", "max_tokens=16")
    for row in _rows(tmp_path, "overlap", run, prompts):
        metrics = row["metrics"]
        assert metrics["overlap_ms"] > 0.2 * metrics["target_compute_ms"]
        assert metrics["overlap_ms"] <= metrics["target_compute_ms"]
        assert metrics["cache_hits"] + metrics["cache_misses"] == metrics["num_rounds"] - 1
        parts = metrics["target_compute_ms"] + metrics["draft_wait_ms"] + metrics["overhead_ms"]
        assert parts == pytest.approx(metrics["decode_seconds"] * 1000)
