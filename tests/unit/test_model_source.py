"""Where models come from: folders, .gguf files, hub ids, the demo; and the cache that conversions live in."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from pipeline.errors import ConfigError
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.cache_folder import build_once, cache_root
from stages.model.runner import ModelRunner
from stages.model.shape import read_shape
from stages.model.source import has_weights, resolve
from stages.model.weights import load_model

TOKENS = ["<|end|>", "Ġ", "a", "b", "1", "2", "ab", "<tool>", "Ċ", "ĠĠ"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    return cache_root()


def write_gguf(path: Path, model: Any, **changes: Any) -> None:
    """A .gguf file of a tiny transformers llama, laid out as the public converters do."""
    config = model.config
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.pop("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if t == "<|end|>" else 4 if t == "<tool>" else 1 for t in TOKENS])
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_eos_token_id(0)
    if "sliding_window" in changes:
        writer.add_sliding_window(changes.pop("sliding_window"))
    writer.add_chat_template("{{ messages[0]['content'] }}")
    if "rope_freqs" in changes:
        writer.add_tensor("rope_freqs.weight", changes.pop("rope_freqs"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float()
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:  # the interleaving that llama.cpp expects
                values = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(values.numpy())
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default", **changes.pop("rope", {})},
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        # Through bfloat16, which is what the converted folder keeps.
        parameter.data = parameter.data.bfloat16().float()
    return model


@torch.inference_mode()
def assert_same_logits(folder: Path, model: Any) -> None:
    loaded = load_model(folder, dtype=torch.float32)
    runner = ModelRunner(
        shape=loaded.shape, weights=loaded.weights, num_slots=64, page_size=4, dtype=torch.float32
    )
    ids = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    rows = SequenceRows(
        kv=runner.kv.allocate(len(ids)), prefix_len=0, write_slots=list(range(32)), tail_len=32, mask=None
    )
    batch = ForwardBatch(token_ids=ids, positions=list(range(32)), sequences=[rows], logit_rows=None)
    assert (runner.forward(batch) - model(torch.tensor([ids])).logits[0]).abs().max() < 1e-3


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_file_is_converted_once_and_computes_what_its_model_does(
    tmp_path: Path, is_tied: bool
) -> None:
    model = tiny_llama(tie_word_embeddings=is_tied)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model)
    folder = resolve(path)
    assert_same_logits(folder, model)
    marker = folder / "config.json"
    changed = marker.stat().st_mtime_ns
    assert resolve(str(path)) == folder
    assert marker.stat().st_mtime_ns == changed
    assert load_model(folder, dtype=torch.float32).eos_token_ids == (0,)
    path.write_bytes(path.read_bytes() + b"\0")
    assert resolve(path) != folder


def test_the_llama3_position_scaling_inside_a_gguf_file_is_kept(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_llama(rope=scaling, head_dim=64)
    plain = 1.0 / 5000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, rope_freqs=factors)
    folder = resolve(path)
    assert_same_logits(folder, model)
    scaled = torch.tensor(read_shape(folder).rope_inv_freq)
    assert torch.allclose(scaled, model.model.rotary_emb.inv_freq, rtol=1e-4, atol=0)
    assert not torch.allclose(scaled, plain, rtol=1e-4, atol=0)
    other = tmp_path / "other.gguf"
    write_gguf(other, model, rope_freqs=factors**2)
    with pytest.raises(ConfigError, match="not those of Llama 3"):
        resolve(other)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("window", "longest"), [(24, 24), (0, 64), (100, 64)])
def test_a_window_inside_a_gguf_file_cuts_the_context(
    tmp_path: Path, architecture: str, window: int, longest: int
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(), architecture=architecture, sliding_window=window)
    shape = read_shape(resolve(path))
    assert shape.max_position == longest
    assert shape.sliding_window == (window if window == 24 else None)


def test_a_gguf_file_with_a_setting_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gguf.GGUFWriter,
            "add_head_count",
            lambda writer, _: writer.add_string("llama.attention.head_count", "x"),
        )
        write_gguf(path, tiny_llama())
    with pytest.raises(ConfigError, match=r"llama\.attention\.head_count='x', expected a whole number"):
        resolve(path)


def test_the_tokenizer_inside_a_gguf_file_splits_digits_as_its_name_says(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama())
    folder = resolve(path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # smollm: digits are cut out first, so the two spaces before one stay together.
    assert tokenizer.encode("ab  12<tool><|end|>").tokens == ["ab", "ĠĠ", "1", "2", "<tool>", "<|end|>"]
    assert tokenizer.decode([6, 9, 4, 7, 0]) == "ab  1<tool>"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["chat_template"]) == ("<|end|>", "{{ messages[0]['content'] }}")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "mystery"}, "pre-tokenizer 'mystery'"),
        ({"architecture": "gemma"}, "architecture 'gemma'; supported in .gguf files are llama"),
    ],
)
def test_a_gguf_file_that_would_be_read_wrongly_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, changes: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(), **changes)
    with pytest.raises(ConfigError, match=reason):
        resolve(path)
    assert list(cache.iterdir()) == []


def test_paths_that_name_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for path, reason in (
        (tmp_path / "model.bin", "expected a folder or a .gguf file"),
        (tmp_path / "broken.gguf", "cannot be read as GGUF"),
        (tmp_path / "absent" / "deep", "does not exist; expected"),
        ("absent.gguf", "does not exist; expected"),
        (
            "no-such-owner/no-such-model",
            "is no local folder, and Hugging Face cannot be reached: expected a network",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            resolve(path)


@pytest.mark.parametrize("name", ["owner/name", "owner/name/deep"])
def test_a_link_to_nothing_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"owner/name is a link to nowhere, which does not exist"):
        resolve(name)


def test_being_offline_is_said_in_our_own_words() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("no-such-owner/no-such-model")
    assert "HF_HUB_OFFLINE" not in str(caught.value)
    assert str(caught.value).count(".") == 1, "one sentence, besides the dot of model.path"


def test_a_folder_without_any_tokenizer_is_refused_without_asking_a_library(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pipeline.errors import ConfigError\nfrom stages.model.source import resolve\n"
        "try:\n    resolve(sys.argv[1])\nexcept ConfigError as error:\n    print(error)\n"
        "sys.exit('transformers' in sys.modules)"
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith(
        "has no tokenizer.json, and no tokenizer to make it of; add tokenizer.json"
    )


def test_a_folder_without_tokenizer_is_refused_only_where_one_is_needed(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    assert resolve(tmp_path / "model", needs_tokenizer=False) == (tmp_path / "model").resolve()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        resolve(tmp_path / "model")


def test_a_cached_folder_is_built_once_by_many_and_never_seen_half_done(cache: Path) -> None:
    builds = []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "first").write_text("1")
        assert not (cache / "thing").exists()
        (folder / "second").write_text("2")

    threads = [threading.Thread(target=build_once, args=("thing", build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert [entry.name for entry in cache.iterdir()] == ["thing"]
    assert sorted(file.name for file in (cache / "thing").iterdir()) == ["first", "second"]


def test_a_failed_build_leaves_nothing_and_lets_the_next_one_try(cache: Path) -> None:
    """8 at once, of which all but the last fail: each waits for the one before, on a lock that goes away."""
    attempts: list[Path] = []

    def build(folder: Path) -> None:
        attempts.append(folder)
        assert len(list(cache.glob("*.partial"))) == 1, "two builds at once"
        if len(attempts) < 8:
            raise ConfigError("not this time")

    def run() -> None:
        with contextlib.suppress(ConfigError):
            build_once("thing", build)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(attempts) == 8
    assert [entry.name for entry in cache.iterdir()] == ["thing"]


def test_resolving_a_ready_folder_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    code = (
        "import sys; from stages.model.source import resolve; resolve(sys.argv[1]);"
        "sys.exit(bool({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


@pytest.mark.parametrize("path", ["~nosuchuserhere/model", "x" * 300, "a\0b"])
def test_an_impossible_path_is_refused_in_one_line(path):
    with pytest.raises(ConfigError, match=r"model\.path="):
        resolve(path)


def test_a_snapshot_counts_only_with_all_its_weights(tmp_path):
    assert not has_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert not has_weights(tmp_path)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "one.safetensors").touch()
    assert not has_weights(tmp_path)
    (tmp_path / "two.safetensors").touch()
    assert has_weights(tmp_path)
