"""The benchmark's peers on a tiny model: in float64 the tokens of plain decoding, from the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.schema import DType
from pipeline.messages import Sampling
from stages.model.shape import ModelShape, parse_shape, read_shape
from stages.model.weights import load_model
from tests.tiny import EOS, VOCAB_SIZE, PlainDecoder
from tests.tiny_tokenizers import byte_level
from tests.unit.test_draft_folder import named_tensors, save_draft
from tools.bench.assisted_draft import ScatteredHead
from tools.bench.gguf_writer import write_gguf
from tools.bench.protocol import Answer, Batch, NotHere, PeerSpec, Question
from tools.bench.settings import LlamaFormat
from tools.bench.transformers_peer import TransformersPeer

PROMPTS = ([17, 3, 99, 42, 8, 17, 3], [5, 5, 6, 60, 61, 62, 60, 61], [1])
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save_model(folder: Path, **changes: object) -> Path:
    """A random model of `CONFIG` with changes, its weights in bfloat16's numbers."""
    folder.mkdir(parents=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    byte_level().save(str(folder / "tokenizer.json"))
    tensors = named_tensors(parse_shape(config, {}, origin="test"), seed=1)
    save_file(
        {name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "target")


def make_spec(
    name: str, folder: Path, *, draft: Path | None = None, assistant_tokens: int | None = None
) -> PeerSpec:
    return PeerSpec(
        name=name,
        folder=str(folder),
        dtype=DType.float64,
        cores=[0],
        max_context=256,
        batch_size=1,
        draft=None if draft is None else str(draft),
        assistant_tokens=assistant_tokens,
        lookup_tokens=4,
        llama_format=LlamaFormat.bf16,
    )


def ask(
    peer: TransformersPeer, prompt: list[int], *, temperature: float = 0.0, max_tokens: int = 24
) -> Answer:
    question = Question(text="", is_chat=False, prompt_token_ids=prompt, max_tokens=max_tokens, seed=3)
    (answer,) = peer.answer(Batch(questions=[question], temperature=temperature))
    return answer


def make_peer(name: str, target_folder: Path, tmp_path: Path, **options: int) -> TransformersPeer:
    draft = save_draft(tmp_path / "draft", target_folder) if name == "transformers_assisted" else None
    return TransformersPeer(make_spec(name, target_folder, draft=draft, **options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transformers", {}),
        ("transformers_lookup", {}),
        ("transformers_assisted", {}),
        ("transformers_assisted", {"assistant_tokens": 3}),
    ],
)
def test_every_way_of_generate_gives_the_tokens_of_plain_decoding(
    name: str, options: dict[str, int], target_folder: Path, tmp_path: Path
) -> None:
    plain = PlainDecoder(load_model(target_folder, dtype=torch.float64))
    peer = make_peer(name, target_folder, tmp_path, **options)
    for prompt in PROMPTS:
        answer = ask(peer, prompt)
        assert answer.token_ids == plain.generate(prompt, Sampling(max_tokens=24, seed=0))
        assert answer.num_prompt_tokens == len(prompt)
        assert answer.num_rounds is not None
        assert 1 <= answer.num_rounds <= len(answer.token_ids)
        assert answer.num_decoded < len(answer.token_ids)
        assert sum(answer.block_tokens) == len(answer.token_ids)
        assert answer.block_times_s == sorted(answer.block_times_s)
        assert answer.block_times_s[0] > 0
        if name == "transformers":
            assert (answer.num_rounds, answer.num_decoded) == (
                len(answer.token_ids),
                len(answer.token_ids) - 1,
            )


def test_our_draft_is_accepted_as_an_assistant(target_folder: Path, tmp_path: Path) -> None:
    """It is the target with a noisy, reduced head: it must be right now and then, or the wrapper is wrong."""
    peer = make_peer("transformers_assisted", target_folder, tmp_path, assistant_tokens=3)
    answers = [ask(peer, prompt) for prompt in PROMPTS]
    num_rounds = sum(answer.num_rounds or 0 for answer in answers)
    assert sum(len(answer.token_ids) for answer in answers) > 1.15 * num_rounds


@pytest.mark.parametrize("name", ["transformers", "transformers_lookup", "transformers_assisted"])
def test_a_sampled_answer_repeats_with_its_seed_and_one_token_has_no_decode_time(
    name: str, target_folder: Path, tmp_path: Path
) -> None:
    peer = make_peer(name, target_folder, tmp_path)
    first, second = (ask(peer, PROMPTS[0], temperature=1.0) for _ in range(2))
    assert first.token_ids == second.token_ids
    one = ask(peer, PROMPTS[0], max_tokens=1)
    assert (len(one.token_ids), one.num_decoded, one.block_tokens, one.num_rounds) == (1, 0, [1], 1)


def test_a_reduced_head_answers_for_all_ids() -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    head = ScatteredHead(weight, torch.tensor([1, 3]), vocab_size=5)
    logits = head(torch.tensor([[[3.0, 4.0]]]))
    inf = float("inf")
    assert logits.tolist() == [[[-inf, 3.0, -inf, 8.0, -inf]]]


def read_gguf(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    reader = gguf.GGUFReader(path)
    tensors = {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors
    }
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def deinterleaved(matrix: Tensor, num_heads: int) -> Tensor:
    """Rows 0, 2, 4, ... of each head, then rows 1, 3, 5, ...: what llama.cpp's converter undoes."""
    heads = matrix.view(num_heads, -1, *matrix.shape[1:])
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).reshape(matrix.shape)


@pytest.mark.parametrize(("number_format", "tolerance"), [(LlamaFormat.bf16, 0.0), (LlamaFormat.q8_0, 0.01)])
def test_the_gguf_file_holds_the_same_weights(
    number_format: LlamaFormat, tolerance: float, target_folder: Path, tmp_path: Path
) -> None:
    write_gguf(target_folder, tmp_path / "model.gguf", number_format)
    fields, tensors = read_gguf(tmp_path / "model.gguf")
    expected = named_tensors(read_shape(target_folder), seed=1)
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in expected.items()}
    assert len(tensors) == len(rounded)
    for ours, theirs, num_heads in (
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("lm_head.weight", "output.weight", None),
        ("model.norm.weight", "output_norm.weight", None),
        ("model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight", 4),
        ("model.layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight", 2),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight", None),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", None),
    ):
        found = tensors[theirs] if num_heads is None else deinterleaved(tensors[theirs], num_heads)
        assert torch.allclose(found, rounded[ours], rtol=0, atol=tolerance * rounded[ours].abs().max()), ours
    assert fields["general.architecture"] == "llama"
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.rope.freq_base"] == 10000.0
    assert fields["llama.vocab_size"] == VOCAB_SIZE


def test_tied_embeddings_are_stored_once_and_qwen_keeps_its_row_order(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "qwen", model_type="qwen3", tie_word_embeddings=True, head_dim=16)
    write_gguf(folder, tmp_path / "model.gguf", LlamaFormat.bf16)
    fields, tensors = read_gguf(tmp_path / "model.gguf")
    assert fields["general.architecture"] == "qwen3"
    assert "output.weight" not in tensors
    expected = named_tensors(read_shape(folder), seed=1)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(tensors["blk.0.attn_q.weight"], expected.to(torch.bfloat16).float())
    assert tensors["blk.0.attn_q_norm.weight"].shape == (16,)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_scaled_positions_are_written_as_factors_or_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama3", rope_parameters=LLAMA3_ROPE)
    write_gguf(folder, tmp_path / "model.gguf", LlamaFormat.bf16)
    fields, tensors = read_gguf(tmp_path / "model.gguf")
    shape: ModelShape = read_shape(folder)
    base = 500000.0 ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)
    effective = base / tensors["rope_freqs.weight"].numpy()
    assert effective == pytest.approx(np.array(shape.rope_inv_freq), rel=1e-5)
    assert fields["llama.rope.freq_base"] == 500000.0
    other = save_model(tmp_path / "qwen", model_type="qwen2", rope_parameters=LLAMA3_ROPE)
    with pytest.raises(NotHere, match="scales its positions"):
        write_gguf(other, tmp_path / "other.gguf", LlamaFormat.bf16)
