"""The tensors of one model, as the decoder wants them: query, key and value fused, gate and up fused.

Reads safetensors folders and makes random models for tests. Knows the tensor names of the Llama family;
knows nothing about how they are multiplied (see `stages.model.linear`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import ConfigError, shown
from stages.model.config_fields import read_object
from stages.model.shape import ModelShape, read_shape

_INDEX_NAME = "model.safetensors.index.json"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")
"""Buffers that old checkpoints carry and that the shape already determines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """Weight [out, in] and bias [out] of one linear map."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Norm weights are [hidden]; q_norm and k_norm are [head_dim] or None."""

    input_norm: Tensor
    qkv: Affine
    """Rows: all query heads, then all key heads, then all value heads."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Affine
    post_norm: Tensor
    gate_up: Affine
    """Rows: gate, then up."""
    down: Affine


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights of one model, in one dtype."""

    embed: Tensor
    """[vocab, hidden]."""
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Tensor
    """[vocab, hidden]; the same tensor as `embed` when tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for `ModelRunner`."""

    shape: ModelShape
    weights: ModelWeights
    eos_token_ids: tuple[int, ...]


def load_model(path: str | Path, *, dtype: torch.dtype, num_layers: int | None = None) -> LoadedModel:
    """Load a folder with config.json and safetensors.

    num_layers: keep only the first so many layers, with the final norm and the head: an early exit. The
        tensors of the other layers are not read.
    Raises `ConfigError` for unsupported, missing, unexpected or misshapen content.
    """
    folder = Path(path)
    shape = read_shape(folder)
    if num_layers is not None and not 1 <= num_layers <= shape.num_layers:
        raise ConfigError(
            f"{num_layers} layers of {folder} were asked for, expected 1 to {shape.num_layers}; "
            "change speculation.draft.layers"
        )
    file_by_name = _files_by_tensor(folder)
    full = expected_tensors(shape)
    _check_names(folder, shape, set(full), set(file_by_name))
    if num_layers is not None:
        shape = replace(shape, num_layers=num_layers)
    wanted = expected_tensors(shape)
    tensors = dict(_read_tensors(file_by_name, wanted, dtype))
    weights = assemble_weights(shape, lambda name: tensors.pop(name))
    return LoadedModel(shape=shape, weights=weights, eos_token_ids=shape.eos_token_ids)


def read_tensors(path: str | Path, names: Iterable[str], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Only the named ones of `expected_tensors`, from a model folder. Raises `ConfigError`."""
    folder = Path(path)
    file_by_name = _files_by_tensor(folder)
    expected = expected_tensors(read_shape(folder))
    wanted = {name: expected[name] for name in names}
    missing = sorted(wanted.keys() - file_by_name.keys())
    if missing:
        raise ConfigError(f"{folder} lacks the tensor {missing[0]}; expected a model folder")
    return dict(_read_tensors(file_by_name, wanted, dtype))


def random_model(shape: ModelShape, *, seed: int, dtype: torch.dtype) -> LoadedModel:
    """A model with random weights, the same for the same seed and shape in every dtype (up to rounding).

    Scaled so that activations keep their size through the layers and the choice of the next token
    depends on the whole context.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> Tensor:
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            return (1 + 0.1 * values).to(dtype)
        if name.endswith(".bias"):
            return (0.5 * values).to(dtype)
        if name == "model.embed_tokens.weight":
            return values.to(dtype)
        return (values * (1.5 / math.sqrt(size[1]))).to(dtype)

    tensors = {name: draw(name, size) for name, size in expected_tensors(shape).items()}
    weights = assemble_weights(shape, tensors.__getitem__)
    return LoadedModel(shape=shape, weights=weights, eos_token_ids=shape.eos_token_ids)


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor that a checkpoint of this shape holds, in the order of the forward."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        sizes[prefix + "input_layernorm.weight"] = (hidden,)
        linears = (
            ("self_attn.q_proj", q_size, hidden, shape.qkv_bias),
            ("self_attn.k_proj", kv_size, hidden, shape.qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, shape.qkv_bias),
            ("self_attn.o_proj", hidden, q_size, shape.o_bias),
            ("mlp.gate_proj", inner, hidden, shape.mlp_bias),
            ("mlp.up_proj", inner, hidden, shape.mlp_bias),
            ("mlp.down_proj", hidden, inner, shape.mlp_bias),
        )
        for name, num_out, num_in, has_bias in linears:
            sizes[f"{prefix}{name}.weight"] = (num_out, num_in)
            if has_bias:
                sizes[f"{prefix}{name}.bias"] = (num_out,)
        if shape.qk_norm:
            sizes[prefix + "self_attn.q_norm.weight"] = (shape.head_dim,)
            sizes[prefix + "self_attn.k_norm.weight"] = (shape.head_dim,)
        sizes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    sizes["model.norm.weight"] = (hidden,)
    if not shape.tie_embeddings:
        sizes["lm_head.weight"] = (shape.vocab_size, hidden)
    return sizes


def assemble_weights(shape: ModelShape, take: Callable[[str], Tensor]) -> ModelWeights:
    """Fuse the named tensors of a checkpoint. `take` is called once for each of `expected_tensors`."""
    embed = take("model.embed_tokens.weight")
    layers = [_assemble_layer(shape, f"model.layers.{layer}.", take) for layer in range(shape.num_layers)]
    return ModelWeights(
        embed=embed,
        layers=layers,
        final_norm=take("model.norm.weight"),
        head=embed if shape.tie_embeddings else take("lm_head.weight"),
    )


def _assemble_layer(shape: ModelShape, prefix: str, take: Callable[[str], Tensor]) -> LayerWeights:
    def fuse(names: tuple[str, ...], has_bias: bool) -> Affine:
        weight = torch.cat([take(f"{prefix}{name}.weight") for name in names])
        bias = torch.cat([take(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return Affine(weight=weight, bias=bias)

    return LayerWeights(
        input_norm=take(prefix + "input_layernorm.weight"),
        qkv=fuse(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), shape.qkv_bias),
        q_norm=take(prefix + "self_attn.q_norm.weight") if shape.qk_norm else None,
        k_norm=take(prefix + "self_attn.k_norm.weight") if shape.qk_norm else None,
        o=fuse(("self_attn.o_proj",), shape.o_bias),
        post_norm=take(prefix + "post_attention_layernorm.weight"),
        gate_up=fuse(("mlp.gate_proj", "mlp.up_proj"), shape.mlp_bias),
        down=fuse(("mlp.down_proj",), shape.mlp_bias),
    )


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, for sharded and single checkpoints."""
    index, single = folder / _INDEX_NAME, folder / "model.safetensors"
    if index.is_file():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ConfigError(
                f"{index} has weight_map={shown(repr(names))}, expected names of files; fetch it again"
            )
        missing = sorted({name for name in names.values() if not (folder / name).is_file()})
        if missing:
            raise ConfigError(f"{folder} lacks the weight files {', '.join(missing)}; fetch the model again")
        return {tensor: folder / name for tensor, name in names.items()}
    if not single.is_file():
        raise ConfigError(
            f"{folder} holds neither model.safetensors nor {_INDEX_NAME}; expected a folder with safetensors"
        )
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}; fetch it again") from error


def _check_names(folder: Path, shape: ModelShape, expected: set[str], found: set[str]) -> None:
    found = {name for name in found if not name.endswith(_IGNORED_SUFFIXES)}
    if shape.tie_embeddings:
        found.discard("lm_head.weight")  # some checkpoints store the tied head a second time
    for problem, names in (("lacks", expected - found), ("has unexpected", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"{folder} {problem} tensors: {some}{more}; its config.json says {shape.model_type} with "
                f"{shape.num_layers} layers, tie_word_embeddings={shape.tie_embeddings}"
            )


def _read_tensors(
    file_by_name: dict[str, Path], wanted: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for path in sorted({file_by_name[name] for name in wanted}):
        with _open(path) as file:
            for name, size in wanted.items():
                if file_by_name[name] != path:
                    continue
                try:
                    tensor = file.get_tensor(name)
                except SafetensorError as error:
                    raise ConfigError(f"{path} lacks {name}, which its index promises: {error}") from error
                if tuple(tensor.shape) != size or not tensor.is_floating_point():
                    raise ConfigError(
                        f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, expected {size} in a "
                        "floating point format; config.json and weights do not belong together"
                    )
                yield name, tensor.to(dtype)
