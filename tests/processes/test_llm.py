"""`LLM` with real stages and tiny models: in a program, and in a script without a guard or an end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import LLM, SamplingParams
from pipeline.errors import ConfigError, EngineDead, RequestError
from pipeline.llm_outputs import PartialResults
from pipeline.messages import Sampling
from pipeline.topology import usable_cores
from tests.processes.runtime import children, open_files, traces
from tests.tiny_folder import TinyFolder, save_tiny_folder

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["hello world", "The quick", "def add(", "東京", "a", "naïve café"]

SCRIPT = """
import asyncio, os, sys
from pipeline import LLM, SamplingParams

async def notebook():  # where a loop runs already, as in a notebook
    return llm.generate(["hello world", "a"], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)

llm = LLM(sys.argv[1], speculative_config={"method": "ngram"}, dtype="float64", max_model_len=64)
print(os.getpid())
for output in asyncio.run(notebook()):
    print(output.outputs[0].token_ids)
"""
"""It has no `__main__` guard, and closes nothing."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def llm(tiny: TinyFolder) -> Iterator[LLM]:
    before = (children(), open_files(), usable_cores())
    speculation = {
        "method": "saguaro_tree",
        "model": str(tiny.folder),
        "num_speculative_tokens": 4,
        "budget": 6,
        "plan": "fixed",  # the planner may find plain decoding as fast, and prepare nothing
    }
    llm = LLM(
        str(tiny.folder), speculative_config=speculation, dtype="float64", max_model_len=96, max_num_seqs=3
    )
    assert usable_cores() == before[2], "the program keeps its cores while nothing is asked"
    with llm:
        yield llm
    llm.close()
    assert (children(), usable_cores()) == (before[0], before[2])
    assert open_files() <= before[1]
    assert traces() == set()
    with pytest.raises(EngineDead, match="this LLM is closed"):
        llm.generate("hello")


def test_each_prompt_gets_its_own_answer_with_its_own_parameters(llm: LLM, tiny: TinyFolder) -> None:
    prompts = PROMPTS * 3
    params = [
        SamplingParams(max_tokens=1 + n % 9, temperature=n % 2, seed=n, top_p=0.9)
        for n in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        expected = tiny.expected(prompt, Sampling(**one.options))
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == tiny.text(expected)
        assert output.outputs[0].seed == one.seed
        assert output.metrics.num_rounds >= 1
    # Whether an outcome was prepared in time is up to the machine; that it was looked for is not.
    metrics = [output.metrics for output in outputs]
    assert sum((m.cache_hits or 0) + (m.cache_misses or 0) for m in metrics) > 0
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert sum(m.num_rounds for m in metrics) < num_tokens


def test_token_ids_get_the_answer_of_the_text_that_they_encode(llm: LLM, tiny: TinyFolder) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    encoded = [tiny.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    ids = [{"prompt_token_ids": token_ids} for token_ids in encoded]
    texts = llm.generate(PROMPTS, params, use_tqdm=False)
    mixed = llm.generate(
        [given for pair in zip(ids, PROMPTS, strict=True) for given in pair], params, use_tqdm=False
    )
    for number, output in enumerate(texts):
        expected = tiny.expected(PROMPTS[number], Sampling(**params.options))
        assert output.outputs[0].token_ids == expected
        from_ids, from_text = mixed[2 * number : 2 * number + 2]
        assert from_ids.outputs[0].token_ids == from_text.outputs[0].token_ids == expected
        assert (from_ids.prompt, from_ids.prompt_token_ids) == (None, encoded[number])
        assert (from_text.prompt, from_text.prompt_token_ids) == (PROMPTS[number], encoded[number])
        assert from_ids.num_prompt_tokens == len(encoded[number])
    # What no text encodes to: special tokens, and one of them last.
    odd = [0, 1, 5, 5, 2, 0]
    options = {"max_tokens": 6, "temperature": 0, "echo": True}
    (single,) = llm.generate({"prompt_token_ids": odd}, SamplingParams(**options), use_tqdm=False)
    expected = tiny.expected_after(odd, Sampling(max_tokens=6, seed=0))
    assert single.outputs[0].token_ids == expected
    prompt_text = tiny.tokenizer.decode(odd, skip_special_tokens=False)
    assert single.outputs[0].text == prompt_text + tiny.text(expected)
    # The model has rows for more ids than the tokenizer has tokens.
    last = max(tiny.tokenizer.get_vocab().values())
    bad = [{"prompt_token_ids": [last]}, {"prompt_token_ids": [1, last + 1]}, "hello"]
    with pytest.raises(PartialResults, match=rf"prompt 1: .*\[1\]: .* 0 to {last}, got {last + 1}") as caught:
        llm.generate(bad, SamplingParams(max_tokens=3), use_tqdm=False)
    assert [output is None for output in caught.value.outputs] == [False, True, False]


def test_log_probabilities_have_vllms_shape(llm: LLM, tiny: TinyFolder) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2, echo=True)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 8
    for token_id, by_id in zip(answer.token_ids, answer.logprobs, strict=True):
        own = by_id[token_id]
        assert next(iter(by_id)) == token_id
        assert len(by_id) == (2 if own.rank <= 2 else 3)
        assert sorted(entry.rank for entry in by_id.values()) == sorted({1, 2, own.rank})
        assert all(
            entry.decoded_token == tiny.tokenizer.decode([other], skip_special_tokens=False)
            for other, entry in by_id.items()
        )
    total = sum(by_id[t].logprob for t, by_id in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)
    (without,) = llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)
    assert (without.outputs[0].logprobs, without.outputs[0].cumulative_logprob) == (None, None)


def test_one_conversation_or_several(llm: LLM, tiny: TinyFolder) -> None:
    chat = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=5, temperature=0)
    (single,) = llm.chat(chat, params, use_tqdm=False)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert single.prompt_token_ids == tiny.tokenizer.encode(rendered).ids
    assert single.outputs[0].token_ids == tiny.expected(rendered, Sampling(**params.options))
    several = llm.chat([chat, chat], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in several] == [single.outputs[0].token_ids] * 2
    assert llm.generate([], params) == []
    assert llm.generate({"prompt": "hello"}, params, use_tqdm=False)[0].prompt == "hello"


def test_prompts_that_cannot_be_answered(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    for bad in (["hello", ""], [7], ["hello", None], [{"prompt": ""}]):
        with pytest.raises(RequestError, match=rf"prompt {len(bad) - 1}: expected some text"):
            llm.generate(bad, params)  # type: ignore[arg-type]
    for bad in ([{"prompt_token_ids": [True]}], ["hello", {"prompt_token_ids": []}], ["a", {"text": "b"}]):
        with pytest.raises(RequestError, match=rf"prompt {len(bad) - 1}: .*expected"):
            llm.generate(bad, params)  # type: ignore[arg-type]
    with pytest.raises(
        RequestError, match="expected 1 SamplingParams for all or 2, one for each prompt; got 3"
    ):
        llm.generate(["a", "b"], [params] * 3)
    for wrong in ({"max_tokens": 3}, 7, [7], ["greedy"], "greedy"):
        with pytest.raises(RequestError, match=r"expected .*SamplingParams, got"):
            llm.generate("a", wrong)  # type: ignore[arg-type]
    for none in (7, None, {"a", "b"}, b"a"):
        with pytest.raises(RequestError, match="expected one or a list of prompts, got"):
            llm.generate(none)  # type: ignore[arg-type]
    for none in (7, None, "hello", {"role": "user", "content": "hello"}):
        with pytest.raises(RequestError, match="expected one or a list of conversations, got"):
            llm.chat(none)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt 1: the prompt is not valid Unicode text"):
        llm.generate(["hello", "\ud800"])
    with pytest.raises(PartialResults, match=r"1 of 2 .*prompt 1: the prompt has .* tokens") as caught:
        llm.generate(["hello", "x " * 100], params, use_tqdm=False)
    first, second = caught.value.outputs
    assert first is not None
    assert first.outputs[0].token_ids
    assert second is None


def test_a_model_that_does_not_exist_is_said_at_once() -> None:
    before = traces()
    with pytest.raises(ConfigError, match=r"model\.path=/no/such/folder does not exist"):
        LLM("/no/such/folder")
    assert traces() == before


def test_a_script_needs_no_guard_and_leaves_nothing(tiny: TinyFolder, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(tiny.folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    expected = [tiny.expected(prompt, Sampling(max_tokens=4, seed=0)) for prompt in ("hello world", "a")]
    pid, _, answers = done.stdout.partition("\n")
    assert answers == "".join(f"{ids}\n" for ids in expected), done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert traces(int(pid)) == set()
