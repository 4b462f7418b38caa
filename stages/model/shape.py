"""What a model looks like: sizes, options and rotary frequencies, read from a Hugging Face `config.json`.

Owns the list of supported families and every refusal of a configuration that the decoder would compute
wrongly. Knows nothing about weights. Default values of absent keys are those of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_NUM_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_PLAIN_ROPE_TYPES = ("default", "linear")
_TRANSFORMERS_ROPE_TYPES = ("dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Everything the decoder has to know about a model besides its weights."""

    model_type: str
    vocab_size: int
    """Rows of the embedding, padding rows included."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position: int
    """Most tokens of one sequence. Cut to the sliding window, inside which windowed attention is plain
    attention, and for longrope to the length up to which the short factors hold."""
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_inv_freq: tuple[float, ...]
    """[head_dim / 2], float32 values."""
    rope_attention_scaling: float
    """Factor on cos and sin."""
    sliding_window: int | None
    """The window of a model that has an active one; None otherwise."""
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def read_shape(folder: Path) -> ModelShape:
    """Read `config.json` and `generation_config.json` of a model folder. Raises `ConfigError`."""
    config = _read_json(folder / "config.json", is_required=True)
    generation = _read_json(folder / "generation_config.json", is_required=False)
    return parse_shape(config, generation, origin=str(folder))


def parse_shape(config: Mapping[str, Any], generation: Mapping[str, Any], *, origin: str) -> ModelShape:
    """Build the shape of a model from its parsed configuration files.

    origin: what to call the model in errors.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{origin}: model_type {model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}. Set model.path to one of those"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{origin}: the weights are quantized (quantization_config in config.json), expected plain "
            "bfloat16, float16 or float32 weights; choose the unquantized version or a .gguf file"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{origin}: hidden_act is {activation!r}, only 'silu' is supported")

    sizes = {
        key: _positive_int(config, key, origin)
        for key in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        )
    }
    num_heads = sizes["num_attention_heads"]
    head_dim = config.get("head_dim") or (128 if model_type == "qwen3" else sizes["hidden_size"] // num_heads)
    num_kv_heads = config.get("num_key_value_heads", _DEFAULT_NUM_KV_HEADS.get(model_type)) or num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise ConfigError(
            f"{origin}: {num_heads} attention heads over {num_kv_heads} key/value heads of {head_dim} "
            "dimensions; expected a whole number of heads a group and an even head_dim"
        )
    has_attention_bias = model_type in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    max_position = int(config.get("max_position_embeddings") or _DEFAULT_MAX_POSITION[model_type])
    window = _sliding_window(config, model_type, sizes["num_hidden_layers"])
    inv_freq, scaling, rope_limit = _rope(config, model_type, head_dim, max_position, origin)
    return ModelShape(
        model_type=model_type,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=sizes["intermediate_size"],
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=min(max_position, rope_limit, window or max_position),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=has_attention_bias or model_type == "qwen2",
        o_bias=has_attention_bias,
        mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        rope_inv_freq=inv_freq,
        rope_attention_scaling=scaling,
        sliding_window=window,
        eos_token_ids=_eos_token_ids(config, generation),
    )


def tiny_shape(
    *,
    vocab_size: int = 128,
    num_layers: int = 2,
    model_type: str = "llama",
    tie_embeddings: bool = False,
    max_position: int = 512,
    eos_token_ids: tuple[int, ...] = (),
) -> ModelShape:
    """A model small enough for tests: hidden size 64, 4 heads over 2 key/value heads of 16 dimensions."""
    head_dim = 16
    return ModelShape(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        intermediate_size=128,
        rms_norm_eps=1e-6,
        max_position=max_position,
        tie_embeddings=tie_embeddings,
        qkv_bias=model_type == "qwen2",
        o_bias=False,
        mlp_bias=False,
        qk_norm=model_type == "qwen3",
        rope_inv_freq=_default_inv_freq(10000.0, head_dim),
        rope_attention_scaling=1.0,
        sliding_window=None,
        eos_token_ids=eos_token_ids,
    )


def _read_json(path: Path, *, is_required: bool) -> dict[str, Any]:
    if not path.is_file():
        if is_required:
            raise ConfigError(f"{path} does not exist; expected a model folder with a config.json")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _positive_int(config: Mapping[str, Any], key: str, origin: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{origin}: config.json has {key}={value!r}, expected a positive integer")
    return value


def _sliding_window(config: Mapping[str, Any], model_type: str, num_layers: int) -> int | None:
    """The window of any layer that has one. Absent keys mean what they mean to transformers."""
    if model_type == "mistral":
        window = config.get("sliding_window", 4096)
        return int(window) if window else None
    if model_type in ("qwen2", "qwen3") and config.get("use_sliding_window", False):
        window = config.get("sliding_window", 4096)
        layer_types = config.get("layer_types")
        if layer_types is None:
            has_windowed_layer = num_layers > int(config.get("max_window_layers", 28))
        else:
            has_windowed_layer = "sliding_attention" in layer_types
        return int(window) if window and has_windowed_layer else None
    return None


def _rope(
    config: Mapping[str, Any], model_type: str, head_dim: int, max_position: int, origin: str
) -> tuple[tuple[float, ...], float, int]:
    """Inverse frequencies, factor on cos and sin, and the length up to which they hold."""
    # transformers 5 writes `rope_parameters`; older files have `rope_scaling` beside `rope_theta`.
    parameters: dict[str, Any] = dict(config.get("rope_scaling") or {})
    parameters.update(config.get("rope_parameters") or {})
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"{origin}: partial_rotary_factor is {partial}, only 1.0 is supported")
    if rope_type in _PLAIN_ROPE_TYPES:
        factor = float(parameters["factor"]) if rope_type == "linear" else 1.0
        return _default_inv_freq(theta, head_dim, factor), 1.0, max_position
    if rope_type not in _TRANSFORMERS_ROPE_TYPES:
        supported = ", ".join(_PLAIN_ROPE_TYPES + _TRANSFORMERS_ROPE_TYPES)
        raise ConfigError(f"{origin}: rope_type {rope_type!r} is not supported; supported are {supported}")

    # Imported here because transformers takes seconds to load and most models scale nothing.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {key: value for key, value in config.items() if key not in ("model_type", "head_dim")}
    hf_config = AutoConfig.for_model(model_type, head_dim=head_dim, **known)
    # No sequence length given: `dynamic` then has its unscaled base, which transformers too uses up to
    # max_position_embeddings; `longrope` its short factors, which hold up to the original length.
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf_config)
    limit = max_position
    if rope_type == "longrope":
        limit = int(hf_config.rope_parameters["original_max_position_embeddings"])
    return tuple(inv_freq.float().tolist()), float(scaling), limit


def _default_inv_freq(theta: float, head_dim: int, factor: float = 1.0) -> tuple[float, ...]:
    if not (theta > 0 and math.isfinite(theta) and factor > 0):
        raise ConfigError(f"rope_theta={theta} and factor={factor}, expected positive finite numbers")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return tuple(((1.0 / theta**exponents) / factor).tolist())


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
