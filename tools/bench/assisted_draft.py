"""Our distilled draft as a model that transformers takes for an assistant.

The draft's head knows some of the ids only, and its embedding is the target's: the wrapper shares the
target's embedding and spreads the head's logits over the whole vocabulary, with -inf where there is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from stages.model.draft_folder import load_draft_folder
from stages.model.shape import ModelShape
from stages.model.weights import LayerWeights, ModelWeights


class ScatteredHead(nn.Module):
    """A head over some ids that answers for all."""

    def __init__(self, weight: Tensor, token_ids: Tensor, vocab_size: int) -> None:
        """weight: [R, hidden]. token_ids: int64 [R], the id of each row."""
        super().__init__()
        self.weight: Tensor
        self.token_ids: Tensor
        self.register_buffer("weight", weight)
        self.register_buffer("token_ids", token_ids)
        self._vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> logits [..., vocab], -inf where the head has no row."""
        known = nn.functional.linear(hidden, self.weight)
        logits = known.new_full((*known.shape[:-1], self._vocab_size), -torch.inf)
        return logits.index_copy_(-1, self.token_ids, known)


def load_assistant(
    folder: Path, target_folder: Path, target: Any, *, dtype: torch.dtype, num_tokens: int | None
) -> Any:
    """The draft in `folder` as a model of transformers; eager attention.

    target: the loaded transformers model, whose embedding is shared.
    num_tokens: drafted a round; None leaves number and confidence threshold to transformers.
    Raises `ConfigError` if the draft does not belong to the target.
    """
    draft = load_draft_folder(folder, target_folder, dtype=dtype)
    shape, weights = draft.model.shape, draft.model.weights
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    ).eval()
    model.model.embed_tokens = target.model.embed_tokens
    model.lm_head = ScatteredHead(weights.head, draft.head_token_ids, shape.vocab_size)
    model.load_state_dict(
        {
            **_body_tensors(shape, weights),
            "model.embed_tokens.weight": target.model.embed_tokens.weight,
            "lm_head.weight": weights.head,
            "lm_head.token_ids": draft.head_token_ids,
        }
    )
    own: dict[str, Any] = {}
    if num_tokens is not None:
        own = {
            "num_assistant_tokens": num_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, **own)
    return model


def _body_tensors(shape: ModelShape, weights: ModelWeights) -> dict[str, Tensor]:
    """The layers and the final norm, by the names that transformers gives them."""
    tensors = {"model.norm.weight": weights.final_norm}
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(shape, layer).items():
            if tensor is not None:
                tensors[f"model.layers.{index}.{name}"] = tensor
    return tensors


def _layer_tensors(shape: ModelShape, layer: LayerWeights) -> dict[str, Tensor | None]:
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    named: dict[str, Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
    }
    fused = (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), [q_size, kv_size, kv_size]),
        (layer.o, ("self_attn.o_proj",), [shape.hidden_size]),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), [shape.intermediate_size, shape.intermediate_size]),
        (layer.down, ("mlp.down_proj",), [shape.hidden_size]),
    )
    for affine, names, sizes in fused:
        weights = torch.split(affine.weight, sizes)
        biases = (None,) * len(names) if affine.bias is None else torch.split(affine.bias, sizes)
        for name, weight, bias in zip(names, weights, biases, strict=True):
            named[f"{name}.weight"], named[f"{name}.bias"] = weight, bias
    return named
