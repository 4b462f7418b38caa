"""The distillation's network, loss and batches against plain torch, and a whole run on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.errors import ConfigError
from stages.model.draft_folder import load_draft_folder
from stages.model.runner import ModelRunner
from stages.model.shape import read_shape
from stages.model.weights import load_model
from tests.tiny import tiny_runner
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_level
from tests.unit.test_draft_folder import named_tensors
from tests.unit.test_model_runner import forward_chain
from tools.distill.batches import collate, epoch, row_map
from tools.distill.command import main, run
from tools.distill.draft_network import HEAD_NAME, DraftNetwork, default_layers, initial_tensors
from tools.distill.head_vocabulary import read_vocabulary
from tools.distill.law_loss import law_loss, target_law
from tools.distill.settings import DistillSettings, Step, StoredDType, compose_settings
from tools.distill.shards import Answer, read_answers, read_done
from tools.distill.trainer import CHECKPOINT

VOCAB_SIZE = 448
EOS = 2


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model with random weights and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    byte_level().save(str(folder / "tokenizer.json"))
    save_file(named_tensors(read_shape(folder), seed=1), folder / "model.safetensors")
    return folder


def make_answer(
    generator: torch.Generator, *, key: int = 1, prompt: int = 5, answer: int = 7, k: int = 4
) -> Answer:
    def ids(*size: int) -> torch.Tensor:
        return torch.randint(VOCAB_SIZE, size, generator=generator, dtype=torch.int32)

    logits = torch.randn(answer, k, generator=generator).sort(dim=1, descending=True).values
    return Answer(
        key=key,
        round_index=0,
        source="test",
        temperature=0.0,
        prompt_ids=ids(prompt),
        answer_ids=ids(answer),
        top_ids=torch.stack(
            [torch.randperm(VOCAB_SIZE, generator=generator)[:k] for _ in range(answer)]
        ).int(),
        top_logprobs=(logits.log_softmax(dim=1) - 0.2).half(),
    )


def test_the_training_network_computes_what_the_engine_computes(target_folder: Path) -> None:
    ids = torch.arange(VOCAB_SIZE)
    shape, tensors, embed = initial_tensors(target_folder, [0, 1, 2], ids)
    network = DraftNetwork(shape, embed, num_positions=64, dtype=torch.float32)
    token_ids = torch.randint(VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(4))
    hidden = network.hidden(tensors, token_ids, torch.arange(18))
    logits = (hidden @ tensors[HEAD_NAME].t()).view(2, 9, -1)
    runner: ModelRunner = tiny_runner(load_model(target_folder, dtype=torch.float32))
    for row in range(2):
        expected = forward_chain(runner, runner.kv.allocate(16), token_ids[row].tolist())
        assert logits[row] == pytest.approx(expected, abs=2e-4)
        assert expected.std() > 0.1


def test_padding_and_neighbours_change_nothing(target_folder: Path) -> None:
    shape, tensors, embed = initial_tensors(target_folder, [0, 2], torch.arange(VOCAB_SIZE))
    network = DraftNetwork(shape, embed, num_positions=64, dtype=torch.float32)
    token_ids = torch.randint(VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(4))
    rows = torch.tensor([16 + 3, 16 + 7])
    together = network.hidden(tensors, token_ids, rows)
    alone = network.hidden(tensors, token_ids[1:2, :8], torch.tensor([3, 7]))
    assert together == pytest.approx(alone, abs=1e-5)


def test_the_gradient_is_that_of_the_loss_written_out(target_folder: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    head_ids = torch.arange(0, VOCAB_SIZE, 2)
    shape, tensors, embed = initial_tensors(target_folder, [0, 2], head_ids)
    network = DraftNetwork(shape, embed, num_positions=64, dtype=torch.float32)
    answers = [make_answer(generator), make_answer(generator, prompt=3, answer=4)]
    batch = collate(answers, row_of_id=row_map(head_ids, VOCAB_SIZE), token_weight=0.25)
    ours = {name: tensor.clone().requires_grad_(True) for name, tensor in tensors.items()}
    loss, _ = law_loss(network.hidden(ours, batch.token_ids, batch.rows), ours[HEAD_NAME], batch.law)
    loss.backward()

    theirs = {name: tensor.clone().requires_grad_(True) for name, tensor in tensors.items()}
    logits = network.hidden(theirs, batch.token_ids, batch.rows) @ theirs[HEAD_NAME].t()
    target = torch.zeros_like(logits).scatter_add_(1, batch.law.rows, batch.law.weights)
    plain = -(target * logits.log_softmax(dim=1)).sum() / batch.law.weights.sum()
    plain.backward()
    for name, tensor in theirs.items():
        assert ours[name].grad == pytest.approx(tensor.grad, abs=1e-5), name
        assert tensor.grad is not None
        assert tensor.grad.abs().max() > 1e-4


def test_norm_and_gate_have_the_gradients_of_autograd() -> None:
    from tools.distill.draft_network import GatedSilu, norm_rows

    generator = torch.Generator().manual_seed(2)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_(True)

    assert torch.autograd.gradcheck(lambda x, w: norm_rows(x, w, 1e-6), (draw(3, 8), draw(8)))
    assert torch.autograd.gradcheck(GatedSilu.apply, (draw(3, 8), draw(3, 8)))


def test_the_law_is_renormalised_on_the_ids_of_the_head() -> None:
    law = target_law(
        top_ids=torch.tensor([[4, 7, 2], [7, 9, 11]]),
        top_logprobs=torch.tensor([[0.5, 0.3, 0.1], [0.5, 0.2, 0.2]]).log(),
        committed=torch.tensor([2, 7]),
        row_of_id=row_map(torch.tensor([2, 4]), 16),
        token_weight=0.5,
    )
    # Ids 4 and 2 are rows 1 and 0; the second position has nothing in the head.
    assert law.weights[0] == pytest.approx(torch.tensor([0.5 * 0.5 / 0.6, 0, 0.5 * 0.1 / 0.6, 0.5]))
    assert law.weights[1].tolist() == [0, 0, 0, 0]
    assert law.rows[0].tolist() == [1, 0, 0, 0]
    assert law.best.tolist() == [1, -1]


def test_an_epoch_has_every_answer_once_within_the_budget() -> None:
    generator = torch.Generator().manual_seed(9)
    answers = [make_answer(generator, key=i, prompt=3 + i % 30, answer=2 + i % 17) for i in range(100)]
    groups = list(epoch(answers, batch_tokens=256, seed="1"))
    assert sorted(a.key for group in groups for a in group) == list(range(100))
    for group in groups:
        batch = collate(group, row_of_id=row_map(torch.arange(VOCAB_SIZE), VOCAB_SIZE), token_weight=0.1)
        assert batch.token_ids.numel() <= 256
        assert len(batch.rows) == sum(len(a.answer_ids) for a in group)
    other = list(epoch(answers, batch_tokens=256, seed="2"))
    assert [a.key for a in groups[0]] != [a.key for a in other[0]]


def tiny_settings(tmp_path: Path) -> DistillSettings:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"the dog {i}", "source": "s"}) for i in range(150)))
    return DistillSettings(
        target="",
        out=str(tmp_path / "draft"),
        prompts=str(prompts),
        own_prompts=0,
        invented=3,
        batch_rows=16,
        max_prompt_tokens=60,
        max_answer_tokens=12,
        write_tokens=2500,
        greedy_share=0.8,
        head_size=300,
        layers=[0, 2],
        train_minutes=0.05,
        batch_tokens=512,
        depth=3,
        judge_positions=20,
        target_ms=20.0,
        step_ms=2.0,
    )


def test_a_run_writes_trains_judges_and_saves_and_goes_on_when_asked_again(
    tmp_path: Path, target_folder: Path
) -> None:
    settings = replace(tiny_settings(tmp_path), target=str(target_folder))
    run(settings)
    work = settings.work_folder
    answers = list(read_answers(work / "answers"))
    done, num_tokens = read_done(work / "answers")
    assert num_tokens == sum(len(answer.answer_ids) for answer in answers) >= 2500
    assert len(done) == len(answers)
    figures = json.loads((work / "judge.json").read_text())
    assert len(figures["lengths"]) == 3
    assert 1.0 <= figures["lengths"][0] <= figures["lengths"][2] <= 4.0
    loaded = load_draft_folder(Path(settings.out), target_folder, dtype=torch.float32)
    assert torch.equal(loaded.head_token_ids, read_vocabulary(work))
    assert {0, 1, 2, EOS} <= set(loaded.head_token_ids.tolist())
    assert loaded.model.shape.num_layers == 2
    assert "python -m tools.distill" in (Path(settings.out) / "README.md").read_text()

    before = torch.load(work / CHECKPOINT, weights_only=True)
    assert before["step"] > 0
    again = replace(
        settings, train_minutes=0.1, write_tokens=3000, dtype=StoredDType.float32, steps=list(Step)
    )
    run(again)
    after = torch.load(work / CHECKPOINT, weights_only=True)
    assert after["step"] > before["step"]
    more, num_more = read_done(work / "answers")
    assert more > done
    assert num_more >= 3000
    assert len(list(read_answers(work / "answers"))) == len(more), "no prompt is answered twice in a round"


def test_training_makes_the_draft_agree_more(tmp_path: Path, target_folder: Path) -> None:
    settings = replace(tiny_settings(tmp_path), target=str(target_folder), train_minutes=0.1)
    settings = replace(settings, steps=[Step.write, Step.vocabulary, Step.train], learning_rate=2e-3)
    run(settings)
    history = torch.load(settings.work_folder / CHECKPOINT, weights_only=True)["history"]
    held_out = [float(line.split("loss ")[1].split(",")[0]) for line in history if "held out" in line]
    assert held_out, "some prompts are held out"
    shape, initial, embed = initial_tensors(target_folder, [0, 2], read_vocabulary(settings.work_folder))
    from tools.distill.trainer import Trainer, load_state

    fresh = load_state(settings, initial, tmp_path / "nowhere")
    row_of_id = row_map(read_vocabulary(settings.work_folder), shape.vocab_size)
    answers = [a for a in read_answers(settings.work_folder / "answers") if a.is_held_out]
    start, _ = Trainer(settings, shape, embed, fresh, row_of_id).evaluate(answers, averaged=False)
    assert held_out[-1] < 0.9 * start


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "usage"),
        (["target=demo"], "out is missing"),
        (["target=demo", "out=x", "train_minuts=3"], "did you mean train_minutes"),
        (["target=demo", "out=x", "train_minutes=long"], "train_minutes=long"),
        (["target=demo", "out=x", "steps=[bake]"], "steps"),
        (["target=demo", "out=x", "threads=0"], "threads=0: expected at least 1"),
        (["target=demo", "out=x", "prompts=/nowhere.jsonl"], "there is no such file"),
    ],
)
def test_mistakes_end_with_status_2_and_name_the_key(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert reason in captured.err + captured.out
    assert list(tmp_path.iterdir()) == []


def test_values_are_composed_with_their_types() -> None:
    settings = compose_settings(
        ["target=demo", "out=a b/[c]", "layers=[0,1,29]", "steps=[save,write]", "dtype=bfloat16"]
    )
    assert (settings.target, settings.out) == ("demo", "a b/[c]")
    assert settings.layers == [0, 1, 29]
    assert settings.steps == [Step.save, Step.write]
    assert settings.dtype is StoredDType.bfloat16


def test_steps_out_of_order_say_what_is_missing(tmp_path: Path, target_folder: Path) -> None:
    settings = replace(tiny_settings(tmp_path), target=str(target_folder), steps=[Step.train])
    with pytest.raises(ConfigError, match=r"run steps=\[vocabulary\] first"):
        run(settings)


def test_default_layers_are_the_first_and_last_two() -> None:
    assert default_layers(30) == [0, 1, 28, 29]
    assert default_layers(3) == [0, 1, 2]
    assert default_layers(1) == [0]
