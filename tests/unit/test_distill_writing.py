"""The distillation's writer against the engine's runner, its sampler, shards and prompts."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

from pipeline.errors import ConfigError
from stages.model.weights import LoadedModel
from tests.tiny import EOS, VOCAB_SIZE, PlainDecoder, tiny_runner, tiny_target
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_level, save_model_folder
from tests.unit.test_distill_training import make_answer
from tests.unit.test_model_runner import forward_chain
from tools.distill.batch_decoder import BatchDecoder
from tools.distill.code_prompts import code_prompts
from tools.distill.code_tasks import code_tasks
from tools.distill.own_prompts import own_prompts
from tools.distill.prompts import Prompt, PromptBook
from tools.distill.repetition import MOST_REPEATS, NGRAM, loop_start
from tools.distill.runner_decoder import RunnerDecoder
from tools.distill.sampler import Sampler
from tools.distill.settings import DistillSettings
from tools.distill.shards import prompt_key, read_answers, read_done, shard_paths, write_shard
from tools.distill.writer import BatchWriter, Job


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


def make_prompt(length: int, seed: int) -> Prompt:
    ids = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Prompt(source="test", token_ids=tuple(ids), key=prompt_key(ids))


def make_job(prompt: Prompt, *, temperature: float = 0.0, max_tokens: int = 12) -> Job:
    return Job(
        prompt=prompt,
        round_index=0,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_ids=frozenset({EOS}),
    )


@pytest.mark.parametrize("kind", [BatchDecoder, RunnerDecoder])
def test_rows_of_different_lengths_have_the_logits_of_single_sequences(
    target: LoadedModel, kind: type[BatchDecoder] | type[RunnerDecoder]
) -> None:
    decoder = kind(target, num_rows=4, num_slots=32)
    prompts = [list(make_prompt(length, seed=length).token_ids) for length in (3, 9)]
    logits = decoder.read(prompts, rows=[2, 0, 1], owner=[0, 1, 0])
    runner = tiny_runner(target)
    expected = [forward_chain(runner, runner.kv.allocate(32), prompt)[-1] for prompt in prompts]
    assert (logits - torch.stack([expected[0], expected[1], expected[0]])).abs().max() < 1e-10
    # Rows 0..3 hold the second prompt, the first, the first, and nothing.
    lengths = torch.tensor([9, 3, 3, 0])
    for tokens in ([4, 7, 7, 1], [6, 9, 2, 1]):
        logits = decoder.step(torch.tensor(tokens), lengths)
        lengths = lengths + torch.tensor([1, 1, 1, 0])
    for row, prompt, added in ((0, 1, [4, 6]), (1, 0, [7, 9]), (2, 0, [7, 2])):
        whole = forward_chain(runner, runner.kv.allocate(32), [*prompts[prompt], *added])[-1]
        assert (logits[row] - whole).abs().max() < 1e-10


def test_greedy_answers_equal_plain_decoding_while_rows_are_taken_over(target: LoadedModel) -> None:
    from pipeline.messages import Sampling

    writer = BatchWriter(target, num_rows=3, num_slots=48, top_tokens=5, seed=1, device="cpu")
    prompts = [make_prompt(4 + index % 7, seed=index) for index in range(10)]
    answers = {answer.key: answer for answer in writer.run(make_job(prompt) for prompt in prompts)}
    plain = PlainDecoder(target)
    greedy = Sampling(max_tokens=12, temperature=0.0, seed=0)
    for prompt in prompts:
        answer = answers[prompt.key]
        expected = plain.generate(prompt.token_ids, greedy)
        expected = expected[: loop_start(expected)]
        assert answer.answer_ids.tolist() == expected
        law = plain.law(prompt.token_ids, greedy)[0].log_softmax(dim=0)
        top = law.topk(5)
        assert answer.top_ids[0].tolist() == top.indices.tolist()
        assert answer.top_logprobs[0].double() == pytest.approx(top.values, abs=0.01)
        assert len(answer.top_ids) == len(expected)


def test_drawn_tokens_follow_the_law_at_their_temperature() -> None:
    # 40,000 draws over 300 tokens in three blocks; the total variation of an exact sampler is about
    # sum sqrt(p / n) * 0.4 = 0.024 here, and 0.05 is far beyond what chance gives.
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, generator=generator) * 2
    sampler = Sampler(seed=5, top_tokens=8)
    num = 40_000
    counts = torch.zeros(300)
    for _ in range(20):
        rows = logits.expand(num // 20, -1)
        ids = sampler.choose(rows, torch.full((num // 20,), 0.7)).token_ids
        counts += torch.bincount(ids, minlength=300)
    expected = (logits / 0.7).softmax(dim=0)
    assert float((counts / num - expected).abs().sum() / 2) < 0.05
    choice = sampler.choose(logits[None], torch.zeros(1))
    assert choice.token_ids.tolist() == [int(logits.argmax())]
    assert choice.top_ids[0].tolist() == logits.topk(8).indices.tolist()


def test_loops_are_cut_before_an_n_gram_comes_once_too_often() -> None:
    assert loop_start(list(range(200))) is None
    assert loop_start([1, 2] * 3) is None
    looping = [7, 8, 9, *list(range(20, 20 + NGRAM)) * 6]
    assert loop_start(looping) == 3 + NGRAM * MOST_REPEATS


def test_shards_come_back_as_they_were_and_half_written_ones_do_not_count(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    answers = [make_answer(generator, key=key, prompt=2 + key, answer=1 + key) for key in range(5)]
    write_shard(tmp_path, answers[:3])
    write_shard(tmp_path, answers[3:])
    (tmp_path / "answers-00002.partial").write_bytes(b"half")
    assert len(shard_paths(tmp_path)) == 2
    found = list(read_answers(tmp_path))
    assert [answer.key for answer in found] == [0, 1, 2, 3, 4]
    for ours, theirs in zip(found, answers, strict=True):
        for name in ("prompt_ids", "answer_ids", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert read_done(tmp_path) == ({(key, 0) for key in range(5)}, 15)


def test_one_prompt_is_always_on_the_same_side_of_the_split() -> None:
    generator = torch.Generator().manual_seed(1)
    keys = [prompt_key([index, 3]) for index in range(4000)]
    held_out = [make_answer(generator, key=key, answer=1).is_held_out for key in keys]
    # 1 in 40 of 4,000: 100 expected, standard deviation 10.
    assert 60 < sum(held_out) < 140


def test_own_prompts_are_varied_and_the_same_for_the_same_seed() -> None:
    prompts = own_prompts(500, seed=1)
    assert prompts == own_prompts(500, seed=1)
    assert len({text for _, text in prompts}) == 500
    assert {source for source, _ in prompts} == {"own/topic", "own/passage", "own/sums"}
    assert not [text for _, text in prompts if "{" in text]


def test_code_prompts_are_signatures_with_a_docstring_and_no_body() -> None:
    prompts = code_prompts(50, seed=1)
    assert len(set(prompts)) == 50
    for text in prompts:
        assert "def " in text
        assert text.endswith('"""\n')


def test_code_tasks_parse_and_state_examples_of_their_own_name() -> None:
    tasks = code_tasks(300, seed=1)
    assert tasks == code_tasks(300, seed=1)
    assert len(set(tasks)) == 300
    num_examples = 0
    for text in tasks:
        (function,) = ast.parse(text[text.index("def ") :]).body
        assert isinstance(function, ast.FunctionDef)
        doc = ast.get_docstring(function) or ""
        for line in doc.splitlines():
            if line.startswith(">>> "):
                assert line.startswith(f">>> {function.name}(")
                num_examples += 1
    assert num_examples > 100


def test_prompts_go_through_the_chat_template_and_invented_turns_are_kept(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "target", byte_level(), chat_template=CHAT_TEMPLATE)
    (folder / "config.json").write_text(
        json.dumps({
            "model_type": "llama", "vocab_size": 448, "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "intermediate_size": 64, "eos_token_id": 2,
        })
    )  # fmt: skip
    book = PromptBook(folder, max_tokens=60)
    tokenizer = byte_level()
    prompt = book.prompt("s", "hello")
    text = tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert 2 in book.end_of_turn_ids

    settings = DistillSettings(out=str(tmp_path / "draft"), target="x", own_prompts=0, invented=4)
    settings.work_folder.mkdir()
    turns = [tokenizer.encode(text).ids for text in ("the quick dog", "the quick dog", "hello world the dog")]
    calls = []

    def invent(openings: object) -> list[list[int]]:
        calls.append(openings)
        return turns

    texts = {p.token_ids for p in book.all_prompts(settings, invent=invent)}
    assert texts == {book.prompt("s", text).token_ids for text in ("the quick dog", "hello world the dog")}
    assert len(book.all_prompts(settings, invent=invent)) == 2
    assert len(calls) == 1, "what was invented is read back"


def test_a_prompt_file_with_a_bad_line_is_refused_with_its_number(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "target", byte_level())
    (folder / "config.json").write_text(
        json.dumps({
            "model_type": "llama", "vocab_size": 448, "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "intermediate_size": 64,
        })
    )  # fmt: skip
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    settings = DistillSettings(out="x", target="x", prompts=str(file), own_prompts=0, invented=0)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: expected a JSON object with `prompt`"):
        PromptBook(folder, max_tokens=60).all_prompts(settings, invent=lambda openings: [])
