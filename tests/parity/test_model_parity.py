"""Our decoder against transformers: the same tiny random checkpoint, logits equal within 1e-3 in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.pages import KVHandle
from stages.model.runner import ModelRunner
from stages.model.source import resolve
from stages.model.weights import load_model

MAX_ERROR = 1e-3
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough that attention is far from uniform and every term of the forward matters.
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.1 * i for i in range(8)],
    "original_max_position_embeddings": 128,
}
CASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama_tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_wide_heads": lambda: transformers.LlamaConfig(**SIZES, head_dim=32),
    "llama3_rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "yarn_rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "linear_rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "dynamic_rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=DYNAMIC),
    "longrope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LONGROPE),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral_window": lambda: transformers.MistralConfig(**SIZES, sliding_window=100, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2_tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=24),
    "qwen3_tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True),
}
# Root and a tree of seven: two children, and below the first one a fork and a chain.
TREE_PARENTS = [-1, 0, 0, 1, 1, 3, 2, 5]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def build_transformers_model(config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.data.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


def runner_for(folder: Path, *, page_size: int = 4) -> ModelRunner:
    loaded = load_model(folder, dtype=torch.float32)
    return ModelRunner(
        shape=loaded.shape, weights=loaded.weights, num_slots=512, page_size=page_size, dtype=torch.float32
    )


def chain(runner: ModelRunner, kv: KVHandle, token_ids: list[int], start: int) -> Tensor:
    slots = list(range(start, start + len(token_ids)))
    rows = SequenceRows(kv=kv, prefix_len=start, write_slots=slots, tail_len=len(slots), mask=None)
    return runner.forward(
        ForwardBatch(token_ids=token_ids, positions=slots, sequences=[rows], logit_rows=None)
    )


def tree_mask(parents: list[int]) -> tuple[Tensor, list[int]]:
    """Ancestor mask [n, n] and depth of each node, by walking up: written apart from the kernel."""
    mask, depths = torch.zeros(len(parents), len(parents), dtype=torch.bool), []
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            at = parents[at]
        mask[node, path] = True
        depths.append(len(path) - 1)
    return mask, depths


def tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.1, "the reference logits say nothing"
    error = (ours - theirs).abs().max().item()
    assert error < MAX_ERROR, f"logits differ by {error}"


@torch.inference_mode()
def check_parity(model: Any, runner: ModelRunner, prompt: list[int], continuation: list[int]) -> None:
    """Prefill, token-by-token decode, and a masked tree after the prompt."""
    theirs = model(torch.tensor([prompt + continuation])).logits[0].float()
    kv = runner.kv.allocate(len(prompt) + len(continuation) + len(TREE_PARENTS))
    assert_close(chain(runner, kv, prompt, 0), theirs[: len(prompt)])
    for offset, token in enumerate(continuation):
        at = len(prompt) + offset
        assert_close(chain(runner, kv, [token], at), theirs[at : at + 1])

    mask, depths = tree_mask(TREE_PARENTS)
    count, prefix = len(TREE_PARENTS), len(prompt)
    tree_tokens = tokens(count, runner.shape.vocab_size, seed=5)
    full_mask = torch.ones(prefix + count, prefix + count, dtype=torch.bool).tril()
    full_mask[prefix:, prefix:] = mask
    bias = torch.zeros(full_mask.shape).masked_fill_(~full_mask, torch.finfo(torch.float32).min)
    positions = [*range(prefix), *(prefix + depth for depth in depths)]
    theirs = model(
        torch.tensor([prompt + tree_tokens]),
        attention_mask=bias[None, None],
        position_ids=torch.tensor([positions]),
    ).logits[0, prefix:]
    slots = list(range(prefix, prefix + count))
    rows = SequenceRows(kv=kv, prefix_len=prefix, write_slots=slots, tail_len=count, mask=mask)
    batch = ForwardBatch(
        token_ids=tree_tokens, positions=positions[prefix:], sequences=[rows], logit_rows=None
    )
    assert_close(runner.forward(batch), theirs.float())
    runner.kv.free(kv)
    runner.kv.check_integrity()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_on_prefill_decode_and_tree(case: str, tmp_path: Path) -> None:
    model = build_transformers_model(CASES[case](), seed=11)
    model.save_pretrained(tmp_path)
    vocab_size = SIZES["vocab_size"]
    check_parity(model, runner_for(tmp_path), tokens(80, vocab_size, seed=1), tokens(5, vocab_size, seed=2))


def test_a_sharded_checkpoint_loads_like_a_single_one(tmp_path: Path) -> None:
    model = build_transformers_model(CASES["qwen3"](), seed=3)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    vocab_size = SIZES["vocab_size"]
    check_parity(model, runner_for(tmp_path), tokens(9, vocab_size, seed=1), tokens(2, vocab_size, seed=2))


def test_transformers_imports_and_builds_a_model_beside_our_kernels_package() -> None:
    # PyPI has a package called `kernels` that transformers looks for; ours must not be taken for it.
    import kernels

    assert not hasattr(kernels, "__version__")
    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()
    build_transformers_model(CASES["llama"](), seed=1)


@pytest.mark.demo
def test_demo_model_equals_transformers_in_float32() -> None:
    folder = resolve(None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    runner = runner_for(folder, page_size=16)
    prompt = tokens(40, 49152, seed=1)
    check_parity(model, runner, prompt, tokens(3, 49152, seed=2))
