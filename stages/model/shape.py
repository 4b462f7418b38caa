"""What a model looks like: sizes, options and rotary frequencies, read from a Hugging Face `config.json`.

Owns the list of supported families and every refusal of a configuration that the decoder would compute
wrongly. Knows nothing about weights. Default values of absent keys are those of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ConfigError, shown
from stages.model.config_fields import ConfigFields, read_object

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_NUM_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_MOST_LAYERS = 2**16
_MOST_HEAD_DIM = 2**16
"""Beyond any model; a damaged file must not make the shape itself large."""
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
    path, generation_path = folder / "config.json", folder / "generation_config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected a model folder with a config.json")
    config = read_object(path)
    generation = read_object(generation_path) if generation_path.is_file() else {}
    return parse_shape(config, generation, origin=str(folder))


def parse_shape(config: Mapping[str, Any], generation: Mapping[str, Any], *, origin: str) -> ModelShape:
    """Build the shape of a model from its parsed configuration files.

    origin: what to call the model in errors.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{origin}: model_type {model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}. Choose one of those"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{origin}: the weights are quantized (quantization_config in config.json), expected plain "
            "bfloat16, float16 or float32 weights; choose the unquantized version or a .gguf file"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{origin}: hidden_act is {activation!r}, only 'silu' is supported")

    fields = ConfigFields(config, where=f"{origin}: config.json")
    hidden_size = fields.whole("hidden_size")
    num_layers = fields.whole("num_hidden_layers", most=_MOST_LAYERS)
    num_heads = fields.whole("num_attention_heads")
    default_head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
    head_dim = fields.whole("head_dim", default_head_dim, most=_MOST_HEAD_DIM)
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    if "num_key_value_heads" not in config:
        num_kv_heads = _DEFAULT_NUM_KV_HEADS.get(model_type, num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ConfigError(
            f"{origin}: {num_heads} attention heads over {num_kv_heads} key/value heads of {head_dim} "
            "dimensions; expected a whole number of heads a group and an even head_dim"
        )
    has_attention_bias = model_type in ("llama", "qwen3") and fields.flag("attention_bias")
    max_position = fields.whole("max_position_embeddings", _DEFAULT_MAX_POSITION[model_type])
    window = _sliding_window(fields, model_type, num_layers)
    inv_freq, scaling, rope_limit = _rope(fields, model_type, head_dim, max_position, origin)
    return ModelShape(
        model_type=model_type,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.whole("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, may_be_zero=True),
        max_position=min(max_position, rope_limit, window or max_position),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=has_attention_bias or model_type == "qwen2",
        o_bias=has_attention_bias,
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias"),
        qk_norm=model_type == "qwen3",
        rope_inv_freq=inv_freq,
        rope_attention_scaling=scaling,
        sliding_window=window,
        eos_token_ids=_eos_token_ids(
            ConfigFields(generation, where=f"{origin}: generation_config.json"), fields
        ),
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


def _sliding_window(fields: ConfigFields, model_type: str, num_layers: int) -> int | None:
    """The window of any layer that has one. Absent keys mean what they mean to transformers."""
    has_window_key = model_type == "mistral" or (
        model_type in ("qwen2", "qwen3") and fields.flag("use_sliding_window")
    )
    if not has_window_key or not fields.values.get("sliding_window", 4096):
        return None
    window = fields.whole("sliding_window", 4096)
    if model_type == "mistral":
        return window
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        return window if num_layers > fields.whole("max_window_layers", 28, least=0) else None
    if not isinstance(layer_types, list):
        raise fields.refusal("layer_types", "a list")
    return window if "sliding_attention" in layer_types else None


def _rope(
    fields: ConfigFields, model_type: str, head_dim: int, max_position: int, origin: str
) -> tuple[tuple[float, ...], float, int]:
    """Inverse frequencies, factor on cos and sin, and the length up to which they hold."""
    # transformers 5 writes `rope_parameters`; older files have `rope_scaling` beside `rope_theta`.
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    merged = {**fields.section("rope_scaling"), **fields.section("rope_parameters")}
    # Keys keep their full name, so that an error gives the one to look for.
    parameters = ConfigFields({f"{name}.{key}": merged[key] for key in merged}, where=fields.where)
    rope_type = merged.get("rope_type", merged.get("type", "default"))
    theta = parameters.number(f"{name}.rope_theta", fields.number("rope_theta", 10000.0))
    partial = merged.get("partial_rotary_factor", fields.values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"{origin}: partial_rotary_factor is {partial}, only 1.0 is supported")
    if rope_type in _PLAIN_ROPE_TYPES:
        factor = parameters.number(f"{name}.factor") if rope_type == "linear" else 1.0
        return _default_inv_freq(theta, head_dim, factor), 1.0, max_position
    if rope_type not in _TRANSFORMERS_ROPE_TYPES:
        supported = ", ".join(_PLAIN_ROPE_TYPES + _TRANSFORMERS_ROPE_TYPES)
        raise ConfigError(f"{origin}: rope_type {rope_type!r} is not supported; supported are {supported}")
    try:
        return _rope_of_transformers(fields.values, model_type, rope_type, head_dim, max_position)
    except Exception as error:  # transformers checks little, and raises whatever comes of it
        reason = shown(f"{type(error).__name__}: {error}", most=200)
        raise fields.refusal(
            name, f"the parameters of {rope_type} scaling (transformers: {reason})"
        ) from error


def _rope_of_transformers(
    config: Mapping[str, Any], model_type: str, rope_type: str, head_dim: int, max_position: int
) -> tuple[tuple[float, ...], float, int]:
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
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return tuple(((1.0 / theta**exponents) / factor).tolist())


def _eos_token_ids(*sources: ConfigFields) -> tuple[int, ...]:
    """Of the first source that has any."""
    for fields in sources:
        value = fields.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise fields.refusal("eos_token_id", "a token id or a list of them")
        return tuple(ids)
    return ()
