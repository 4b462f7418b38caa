"""Turns a .gguf file into a model folder: config.json, generation_config.json, model.safetensors.

Weights are dequantised to bfloat16. Owns the names and layout that GGUF uses for the Llama family; the
tokenizer inside the file is turned by `stages.model.gguf_tokenizer`. Refuses what it would get wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import ConfigError
from stages.model.config_fields import ConfigFields
from stages.model.gguf_tokenizer import write_tokenizer
from stages.model.shape import parse_shape

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CLASS_BY_FAMILY = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every published Llama 3 scales with; the file holds only the resulting factors, which are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """An open .gguf file."""

    path: Path
    fields: dict[str, Any]
    """Metadata, decoded: numbers, strings, lists."""
    tensors: dict[str, Any]
    """gguf.ReaderTensor by GGUF name."""

    @property
    def architecture(self) -> str:
        """What the file calls the model family."""
        return str(self.fields.get("general.architecture"))

    def of_model(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's own prefix. Raises `ConfigError` if absent without default."""
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"{self.path} lacks the metadata {self.architecture}.{key}; fetch it again")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """The same, for a whole number. Raises `ConfigError` for anything else."""
        self.of_model(key, default)
        fields = ConfigFields(self.fields, where=str(self.path))
        return fields.whole(f"{self.architecture}.{key}", default, least=least)


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model in `path` to the empty `folder`. Raises `ConfigError`."""
    file = _open(path)
    config = _config(file)
    generation = {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]}
    parse_shape(config, generation, origin=str(path))
    state = dict(_dequantised(file))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(file, folder)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _open(path: Path) -> GgufFile:
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} cannot be read as GGUF: {error}; fetch it again") from error
    file = GgufFile(path=path, fields=fields, tensors={tensor.name: tensor for tensor in reader.tensors})
    if file.architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"{path} has architecture {file.architecture!r}; supported in .gguf files are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)} (mistral files call themselves llama)"
        )
    if fields.get("split.count", 1) > 1:
        raise ConfigError(f"{path} is one of several parts; merge them first, for example with gguf-split")
    return file


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    try:
        write_tokenizer(file.path, file.fields, folder)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file.path}: its tokenizer cannot be read ({error!r}), expected tokens, merges and token "
            "types; use the model's safetensors folder instead"
        ) from error


def _config(file: GgufFile) -> dict[str, Any]:
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} holds no token_embd.weight, expected a whole model; fetch it again")
    num_heads = file.whole("attention.head_count")
    hidden_size = file.whole("embedding_length")
    head_dim = file.whole("attention.key_length", 0, least=0) or file.whole(
        "rope.dimension_count", 0, least=0
    )
    eos = file.fields.get("tokenizer.ggml.eos_token_id")
    end_of_turn = file.fields.get("tokenizer.ggml.eot_token_id")
    ends = [token for token in dict.fromkeys((eos, end_of_turn)) if token is not None]
    return {
        **_family(file),
        "dtype": "bfloat16",
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "num_hidden_layers": file.of_model("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.of_model("attention.head_count_kv", num_heads),
        "head_dim": head_dim or hidden_size // num_heads,
        "intermediate_size": file.of_model("feed_forward_length"),
        "hidden_act": "silu",
        "max_position_embeddings": file.of_model("context_length"),
        "rms_norm_eps": file.of_model("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, head_dim or hidden_size // num_heads),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else (ends or None),
    }


def _family(file: GgufFile) -> dict[str, Any]:
    """Which family's config.json says what the file says, its sliding window included."""
    window = file.whole("attention.sliding_window", 0, least=0)
    is_windowed = 0 < window < file.whole("context_length")
    model_type, changes = file.architecture, {}
    if is_windowed and model_type == "llama":
        model_type, changes = "mistral", {"sliding_window": window}  # a llama with a window
    elif is_windowed:
        # The file does not say which layers have the window; a context within it is right for any.
        changes = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    return {"architectures": [_CLASS_BY_FAMILY[model_type]], "model_type": model_type, **changes}


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    key = f"{file.architecture}.rope.freq_base"
    theta = ConfigFields(file.fields, where=str(file.path)).number(key, 10000.0)
    scaling = file.of_model("rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        return {"rope_theta": theta, **_llama3_rope(file, theta, head_dim)}
    if scaling == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    parameters = {"rope_theta": theta, "rope_type": scaling, "factor": file.of_model("rope.scaling.factor")}
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = file.of_model("rope.scaling.original_context_length")
    elif scaling != "linear":
        raise ConfigError(f"{file.path} scales its positions by {scaling!r}, expected none, linear or yarn")
    return parameters


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters behind the frequency factors in the file: found by trying, and checked."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = torch.from_numpy(np.array(file.tensors[_ROPE_FACTORS].data, dtype=np.float32))
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 3), **_LLAMA3_ROPE}
    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=file.of_model("context_length"),
        rope_parameters={"rope_theta": theta, **scaling},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if factors.shape != plain.shape or not torch.allclose(plain / factors, scaled, rtol=1e-4, atol=0):
        raise ConfigError(
            f"{file.path} scales its positions by factors that are not those of Llama 3; "
            "use the model's safetensors folder instead"
        )
    return scaling


def _dequantised(file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    num_heads = file.whole("attention.head_count")
    num_kv_heads = file.whole("attention.head_count_kv", num_heads)
    for gguf_name, tensor in file.tensors.items():
        if gguf_name == _ROPE_FACTORS:
            continue
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(f"{file.path}: {gguf_name} is {tensor.tensor_type.name}: {error}") from error
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        if file.architecture == "llama" and ".attn_q." in gguf_name:
            weight = _unpermute(weight, num_heads)
        elif file.architecture == "llama" and ".attn_k." in gguf_name:
            weight = _unpermute(weight, num_kv_heads)
        yield _hugging_face_name(file, gguf_name), weight.to(torch.bfloat16).contiguous()


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo the interleaving of each head's halves, which GGUF does to llama queries and keys."""
    head_dim = weight.shape[0] // num_heads
    return weight.view(num_heads, head_dim // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _hugging_face_name(file: GgufFile, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ConfigError(f"{file.path} holds the tensor {name}, which no supported model has")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
