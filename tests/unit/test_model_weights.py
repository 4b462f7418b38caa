"""Reading checkpoints: what is kept, and what is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.errors import ConfigError
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.draft_card import is_draft_folder
from stages.model.runner import ModelRunner
from stages.model.shape import parse_shape, read_shape
from stages.model.source import has_weights
from stages.model.weights import LoadedModel, expected_tensors, load_model, random_model

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "eos_token_id": 3,
}


def write_model(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A random checkpoint with `changes` to its tensors (None removes one)."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(4)
    state = {
        name: torch.randn(size, generator=generator) / size[-1] ** 0.5
        for name, size in expected_tensors(read_shape(folder)).items()
    }
    for name, tensor in changes.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, folder / "model.safetensors")
    return state


def logits_of(model: LoadedModel) -> torch.Tensor:
    torch.set_num_threads(1)
    runner = ModelRunner(
        shape=model.shape, weights=model.weights, num_slots=16, page_size=4, dtype=torch.float64
    )
    rows = SequenceRows(kv=runner.kv.allocate(4), prefix_len=0, write_slots=[0, 1, 2], tail_len=3, mask=None)
    return runner.forward(
        ForwardBatch(token_ids=[5, 6, 7], positions=[0, 1, 2], sequences=[rows], logit_rows=None)
    )


def test_an_early_exit_is_the_model_without_its_later_layers(tmp_path: Path) -> None:
    state = write_model(tmp_path)
    early = load_model(tmp_path, dtype=torch.float64, num_layers=2)
    assert (early.shape.num_layers, len(early.weights.layers)) == (2, 2)
    smaller = tmp_path / "smaller"
    smaller.mkdir()
    (smaller / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    save_file({k: v for k, v in state.items() if "layers.2." not in k}, smaller / "model.safetensors")
    by_hand = load_model(smaller, dtype=torch.float64)
    assert torch.equal(logits_of(early), logits_of(by_hand))
    full = load_model(tmp_path, dtype=torch.float64)
    assert not torch.allclose(logits_of(early), logits_of(full), atol=1e-3)


@pytest.mark.parametrize("num_layers", [0, -1, 4])
def test_an_early_exit_outside_the_model_is_refused(tmp_path: Path, num_layers: int) -> None:
    write_model(tmp_path)
    with pytest.raises(ConfigError, match=rf"{num_layers} layers .* expected 1 to 3.*draft\.layers"):
        load_model(tmp_path, dtype=torch.float32, num_layers=num_layers)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write_model(tmp_path, **{name: None})
    with pytest.raises(ConfigError, match=rf"lacks tensors: {name}"):
        load_model(tmp_path, dtype=torch.float32)
    write_model(tmp_path, **{"model.layers.9.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"unexpected tensors: model\.layers\.9"):
        load_model(tmp_path, dtype=torch.float32)
    write_model(tmp_path, **{name: torch.zeros(47, 32)})
    with pytest.raises(ConfigError, match=rf"{name} is \(47, 32\) .* expected \(48, 32\)"):
        load_model(tmp_path, dtype=torch.float32)
    write_model(tmp_path, **{name: torch.zeros(48, 32, dtype=torch.int8)})
    with pytest.raises(ConfigError, match="int8"):
        load_model(tmp_path, dtype=torch.float32)


def test_broken_absent_and_incomplete_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model(tmp_path, dtype=torch.float32)
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_model(tmp_path, dtype=torch.float32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load_model(tmp_path, dtype=torch.float32)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="lacks the weight files model-00001"):
        load_model(tmp_path, dtype=torch.float32)


def test_other_families_are_refused_with_the_list_of_supported_ones() -> None:
    with pytest.raises(
        ConfigError, match="'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"
    ):
        parse_shape({"model_type": "gpt2"}, {}, origin="here")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"num_key_value_heads": 3}, "4 attention heads over 3"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_type 'su' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_the_decoder_would_compute_wrongly_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_shape({**CONFIG, **change}, {}, origin="here")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_key_value_heads": "two"}, "num_key_value_heads='two', expected a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0, expected a whole number of at least 1"),
        ({"vocab_size": True}, "vocab_size=True, expected a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, expected a whole number from 1 to"),
        ({"head_dim": "x"}, "head_dim='x', expected a whole number"),
        ({"head_dim": 10**30}, "head_dim=1"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings='many', expected a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small', expected a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, expected a number"),
        ({"rope_theta": [1]}, "rope_theta=[1], expected a positive number"),
        ({"rope_theta": 10**400}, "rope_theta=1"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear', expected an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor=None, expected a positive number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "rope_parameters.factor='x'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling="),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "x"}}, "rope_scaling="),
        ({"eos_token_id": "x"}, "eos_token_id='x', expected a token id or a list of them"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id=[1, 'x'], expected a token id or a list of them"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', expected true or false"),
        ({"use_sliding_window": True, "sliding_window": "x"}, "sliding_window='x', expected a whole number"),
        ({"use_sliding_window": True, "layer_types": 3}, "layer_types=3, expected a list"),
        ({"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers='x'"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named_with_its_file_and_what_came(
    change: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_shape({**CONFIG, **change}, {}, origin="here")
    assert str(caught.value).startswith("here: config.json has ")
    assert key in str(caught.value)
    assert "expected " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_end_of_sequence_in_the_generation_config_is_named_with_that_file() -> None:
    with pytest.raises(ConfigError, match=r"here: generation_config\.json has eos_token_id='x'"):
        parse_shape(CONFIG, {"eos_token_id": "x"}, origin="here")


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[1]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{}"]
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json.*expected"):
        load_model(tmp_path, dtype=torch.float32)
    assert not has_weights(tmp_path)


def test_settings_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
        read_shape(tmp_path)
    assert not is_draft_folder(tmp_path)


def test_a_context_is_cut_to_the_window_inside_which_attention_is_plain() -> None:
    windowed = {"model_type": "mistral", "sliding_window": 50}
    assert parse_shape({**CONFIG, **windowed}, {}, origin="here").max_position == 50
    unused = {"model_type": "qwen2", "sliding_window": 50, "use_sliding_window": False}
    assert parse_shape({**CONFIG, **unused}, {}, origin="here").max_position == 128
    used = {"model_type": "qwen2", "sliding_window": 50, "use_sliding_window": True, "max_window_layers": 2}
    assert parse_shape({**CONFIG, **used}, {}, origin="here").max_position == 50
    above = {**used, "max_window_layers": 3}
    assert parse_shape({**CONFIG, **above}, {}, origin="here").max_position == 128


def test_end_of_sequence_comes_from_the_generation_config_first() -> None:
    assert parse_shape(CONFIG, {"eos_token_id": [7, 8]}, origin="here").eos_token_ids == (7, 8)
    assert parse_shape(CONFIG, {}, origin="here").eos_token_ids == (3,)


def test_random_models_depend_on_their_seed_and_on_no_global_state(tmp_path: Path) -> None:
    shape = parse_shape(CONFIG, {}, origin="here")
    state = torch.random.get_rng_state()
    first = logits_of(random_model(shape, seed=1, dtype=torch.float64))
    assert torch.equal(first, logits_of(random_model(shape, seed=1, dtype=torch.float64)))
    assert not torch.allclose(first, logits_of(random_model(shape, seed=2, dtype=torch.float64)), atol=0.1)
    assert torch.equal(state, torch.random.get_rng_state())
