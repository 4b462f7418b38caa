"""A distilled draft's folder: loading, fit to the target, and exact output with a reduced head."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.schema import DraftKind, DType
from kernels.quantise import quantise_rows
from pipeline.errors import ConfigError
from pipeline.messages import BeginDraft, Sampling
from pipeline.model_source import resolve_models
from stages.draft_speculator.draft_source import DraftSource, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.load_source import load_source
from stages.draft_speculator.model_draft import ModelDraft
from stages.model.draft_card import is_draft_folder
from stages.model.draft_folder import (
    load_draft_folder,
    save_draft_folder,
)
from stages.model.shape import ModelShape
from stages.model.source import resolve
from stages.model.weights import LoadedModel, expected_tensors, load_model, random_model
from tests.tiny import EOS, VOCAB_SIZE, PlainDecoder, TinyPipeline, make_config, tiny_runner, tiny_shape
from tests.tiny_tokenizers import byte_level

PROMPT = [17, 3, 99, 42, 8, 17, 3]
HEAD_IDS = torch.arange(0, VOCAB_SIZE, 3)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def named_tensors(shape: ModelShape, *, seed: int) -> dict[str, Tensor]:
    """float64 tensors of a random checkpoint."""
    taken: dict[str, Tensor] = {}
    model = random_model(shape, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for name, size in expected_tensors(shape).items():
        scale = 1.5 / size[-1] ** 0.5 if len(size) == 2 else 1.0
        taken[name] = torch.randn(size, generator=generator, dtype=torch.float64) * scale
        if len(size) == 1:
            taken[name] = 1 + 0.1 * taken[name]
    taken["model.embed_tokens.weight"] = model.weights.embed
    return taken


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    """A tiny target in float64 with a tokenizer."""
    folder = tmp_path / "target"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_level().save(str(folder / "tokenizer.json"))
    save_file(named_tensors(tiny_shape(), seed=1), folder / "model.safetensors")
    return folder


def save_draft(
    folder: Path, target_folder: Path, *, dtype: torch.dtype = torch.float64, ids: Tensor = HEAD_IDS
) -> Path:
    """The target's own layers, moved a little, under a head of the given ids."""
    tensors = named_tensors(tiny_shape(), seed=1)
    del tensors["model.embed_tokens.weight"]
    head = tensors["lm_head.weight"][ids]
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(head.shape, generator=generator, dtype=torch.float64)
    tensors["lm_head.weight"] = 0.8 * head + 0.2 * head.std() * noise
    folder.mkdir(exist_ok=True)
    save_draft_folder(folder, target_folder=target_folder, tensors=tensors, head_token_ids=ids, dtype=dtype)
    return folder


def sampling(temperature: float) -> Sampling:
    return Sampling(max_tokens=48, temperature=temperature, seed=11)


class Watched(ModelDraft):
    """Notes every token that the draft names."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self.named: set[int] = set()

    def extend(self, jobs: list[ExtendJob]) -> None:  # type: ignore[override]
        super().extend(jobs)
        for job in jobs:
            for node in job.nodes:
                following = job.tree.next_tokens[node]
                if following is not None:
                    ranked = following.ranked(9)
                    assert following.ranked(1) == ranked[:1]
                    self.named.update(token for token, _ in ranked)


def watched_draft(draft_folder: Path, target_folder: Path) -> Watched:
    loaded = load_draft_folder(draft_folder, target_folder, dtype=torch.float64)
    return Watched(tiny_runner(loaded.model), vocab_size=VOCAB_SIZE, head_token_ids=loaded.head_token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prepare_outcomes", [False, True])
def test_output_with_a_reduced_head_equals_plain_decoding_and_only_ids_of_the_map_are_named(
    tmp_path: Path, target_folder: Path, prepare_outcomes: bool, temperature: float
) -> None:
    target = load_model(target_folder, dtype=torch.float64)
    source = watched_draft(save_draft(tmp_path / "draft", target_folder), target_folder)
    pipeline = TinyPipeline(make_config(prepare_outcomes=prepare_outcomes, depth=4, budget=8), target, source)
    assert pipeline.generate(PROMPT, sampling(temperature)) == PlainDecoder(target).generate(
        PROMPT, sampling(temperature)
    )
    assert source.named
    assert source.named <= set(HEAD_IDS.tolist())


def full_logits_model(loaded: LoadedModel, ids: Tensor) -> LoadedModel:
    """The draft with its head scattered to the full vocabulary; other ids get a zero row."""
    head = torch.zeros(VOCAB_SIZE, loaded.weights.head.shape[1], dtype=torch.float64)
    head[ids] = loaded.weights.head
    return replace(loaded, weights=replace(loaded.weights, head=head))


def scores_at_root(source: DraftSource, temperature: float) -> tuple[list[int], list[float]]:
    source.begin(
        BeginDraft(request_id="r", prompt_token_ids=PROMPT, sampling=sampling(temperature), max_len=64),
        max_nodes=8,
    )
    tree = DraftTree(PROMPT)
    source.extend([ExtendJob(request_id="r", tree=tree, nodes=list(range(len(PROMPT))))])
    following = tree.next_tokens[tree.root]
    assert following is not None
    ranked = following.ranked(VOCAB_SIZE)
    return [token for token, _ in ranked], [log_prob for _, log_prob in ranked]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_and_noise_belong_to_the_targets_ids(
    tmp_path: Path, target_folder: Path, temperature: float
) -> None:
    loaded = load_draft_folder(
        save_draft(tmp_path / "draft", target_folder), target_folder, dtype=torch.float64
    )
    reduced = ModelDraft(
        tiny_runner(loaded.model), vocab_size=VOCAB_SIZE, head_token_ids=loaded.head_token_ids
    )
    full = ModelDraft(
        tiny_runner(full_logits_model(loaded.model, loaded.head_token_ids)), vocab_size=VOCAB_SIZE
    )
    ids, scores = scores_at_root(reduced, temperature)
    expected = dict(zip(*scores_at_root(full, temperature), strict=True))
    assert sorted(ids) == HEAD_IDS.tolist()
    # Two rows' laws may differ by a constant, which the maximum of the excluded rows moves.
    offset = scores[0] - expected[ids[0]]
    assert scores == pytest.approx([expected[token] + offset for token in ids], abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_int8_matrices_come_back_within_half_a_step(
    tmp_path: Path, target_folder: Path, dtype: torch.dtype
) -> None:
    exact = load_draft_folder(save_draft(tmp_path / "a", target_folder), target_folder, dtype=torch.float64)
    rounded = load_draft_folder(
        save_draft(tmp_path / "b", target_folder, dtype=torch.int8), target_folder, dtype=dtype
    )
    head, expected = rounded.model.weights.head, exact.model.weights.head
    assert head.dtype == dtype
    steps = expected.abs().amax(dim=1, keepdim=True) / 127
    slack = 1.01 * 0.5 * steps + expected.abs() * (2.0**-8 if dtype == torch.bfloat16 else 1e-6)
    assert bool(((head.double() - expected).abs() <= slack).all())
    assert torch.equal(rounded.head_token_ids, HEAD_IDS)


def test_a_row_of_zeros_survives_rounding() -> None:
    values, scale = quantise_rows(torch.zeros(2, 5))
    assert not values.any()
    assert torch.isfinite(scale).all()


def test_the_embedding_is_the_targets_and_is_not_stored(tmp_path: Path, target_folder: Path) -> None:
    folder = save_draft(tmp_path / "draft", target_folder)
    loaded = load_draft_folder(folder, target_folder, dtype=torch.float64)
    target = load_model(target_folder, dtype=torch.float64)
    assert torch.equal(loaded.model.weights.embed, target.weights.embed)
    assert b"embed_tokens" not in (folder / "model.safetensors").read_bytes()[:4096]


def test_the_engine_loads_the_folder_as_a_draft_model(tmp_path: Path, target_folder: Path) -> None:
    folder = save_draft(tmp_path / "draft", target_folder, dtype=torch.int8)
    assert is_draft_folder(folder)
    assert not is_draft_folder(target_folder)
    config = make_config()
    config.model.path = str(target_folder)
    config.model.dtype = DType.float64
    config.speculation.draft.kind = DraftKind.model
    config.speculation.draft.path = str(resolve(folder))
    source = load_source(config)
    target = load_model(target_folder, dtype=torch.float64)
    pipeline = TinyPipeline(config, target, source)
    expected = PlainDecoder(target).generate(PROMPT, sampling(0.0))
    assert pipeline.generate(PROMPT, sampling(0.0)) == expected


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two'"),
        ({"num_hidden_layers": 3}, "draft lacks tensors"),
        ({"draft": {"version": 9}}, "expected an object `draft`"),
    ],
)
def test_a_draft_that_does_not_load_is_named_by_its_own_key(
    tmp_path: Path, target_folder: Path, values: dict[str, object], reason: str
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(target_folder, draft)
    change_config(draft, **values)
    config = make_config()
    config.model.path = str(target_folder)
    config.speculation.draft.kind = DraftKind.model
    config.speculation.draft.path = str(draft)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_source(config)
    assert str(caught.value).startswith("speculation.draft.path: ")


def test_a_draft_that_is_not_found_is_named_by_its_own_key(tmp_path: Path, target_folder: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    config = make_config()
    config.model.path = str(target_folder)
    config.speculation.draft.kind = DraftKind.model
    for name, reason in (
        ("broken.gguf", "cannot be read as GGUF"),
        ("empty", "has no config.json"),
        ("no", "exist"),
    ):
        config.speculation.draft.path = str(tmp_path / name)
        with pytest.raises(ConfigError, match=reason) as caught:
            resolve_models(config)
        assert str(caught.value).startswith("speculation.draft.path=")
        assert "model.path=" not in str(caught.value)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vocab_size": VOCAB_SIZE + 8}, "its vocabulary is 136, expected 128"),
        ({"hidden_size": 128}, "its hidden size is 128, expected 64"),
        ({"draft": {"version": 1}}, "expected an object `draft`"),
        (
            {"draft": {"version": 2, "embedding": "target", "head_vocabulary": 43, "tokenizer_sha256": ""}},
            "the draft has version 2",
        ),
    ],
)
def test_a_draft_of_other_sizes_is_refused(
    tmp_path: Path, target_folder: Path, values: dict[str, object], reason: str
) -> None:
    folder = save_draft(tmp_path / "draft", target_folder)
    change_config(folder, **values)
    with pytest.raises(ConfigError, match=reason):
        load_draft_folder(folder, target_folder, dtype=torch.float64)


def test_a_draft_of_another_tokenizer_is_refused(tmp_path: Path, target_folder: Path) -> None:
    folder = save_draft(tmp_path / "draft", target_folder)
    byte_level(with_bos=True).save(str(target_folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_draft_folder(folder, target_folder, dtype=torch.float64)


@pytest.mark.parametrize("ids", [torch.tensor([3, 2, 7]), torch.tensor([1, 1, 2]), torch.tensor([5, 128])])
def test_head_ids_that_are_not_ascending_ids_of_the_target_are_refused(
    tmp_path: Path, target_folder: Path, ids: Tensor
) -> None:
    folder = save_draft(tmp_path / "draft", target_folder, ids=ids.clamp(max=VOCAB_SIZE - 1))
    stored = load_tensors(folder)
    stored["head_token_ids"] = ids.to(torch.int32)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="head_token_ids must be ascending ids below 128"):
        load_draft_folder(folder, target_folder, dtype=torch.float64)


def load_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight.scale"])
def test_missing_content_is_refused(tmp_path: Path, target_folder: Path, name: str) -> None:
    folder = save_draft(tmp_path / "draft", target_folder, dtype=torch.int8)
    stored = load_tensors(folder)
    del stored[name]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=name.removesuffix(".scale")):
        load_draft_folder(folder, target_folder, dtype=torch.float64)
