"""Writes a model folder as a .gguf file for llama.cpp: the same weights, in bf16 or q8_0, no vocabulary.

Matrices have the asked format, vectors float32, as llama.cpp's own converter has them. The bench hands over
token ids, so the file has no tokenizer. Refuses what the file would get wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from stages.model.config_fields import read_object
from stages.model.shape import ModelShape, read_shape
from stages.model.weights import expected_tensors, read_tensors
from tools.bench.protocol import NotHere
from tools.bench.settings import LlamaFormat

WRITER_VERSION = 1
"""Part of the cache key: raise it when the file changes."""
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_FORMATS = {
    LlamaFormat.bf16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    LlamaFormat.q8_0: (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_Q8_BLOCK = 32


def write_gguf(folder: Path, path: Path, number_format: LlamaFormat) -> None:
    """Write the model in `folder` to `path`. Raises `NotHere` for positions that the format cannot scale."""
    shape = read_shape(folder)
    architecture = _ARCHITECTURES[shape.model_type]
    matrix_type, file_type = _FORMATS[number_format]
    theta = _rope_theta(folder)
    factors = _rope_factors(shape, theta, architecture)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_metadata(writer, folder, shape, theta, file_type)
    names = gguf.get_tensor_name_map(architecture, shape.num_layers)
    for name in expected_tensors(shape):
        tensor = read_tensors(folder, [name], dtype=torch.float32)[name]
        if architecture is gguf.MODEL_ARCH.LLAMA:
            tensor = _as_llama_has_it(name, tensor, shape)
        _add_tensor(writer, names.get_name(name, try_suffixes=(".weight", ".bias")), tensor, matrix_type)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(
    writer: gguf.GGUFWriter, folder: Path, shape: ModelShape, theta: float, file_type: gguf.LlamaFileType
) -> None:
    writer.add_name(folder.name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.max_position)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(theta)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: Tensor, matrix_type: gguf.GGMLQuantizationType
) -> None:
    values = tensor.contiguous().numpy()
    if tensor.dim() == 1:
        writer.add_tensor(name, values)
        return
    if matrix_type is gguf.GGMLQuantizationType.Q8_0 and tensor.shape[1] % _Q8_BLOCK:
        matrix_type = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(name, gguf.quants.quantize(values, matrix_type), raw_dtype=matrix_type)


def _as_llama_has_it(name: str, tensor: Tensor, shape: ModelShape) -> Tensor:
    """llama.cpp rotates neighbours where the checkpoint rotates halves: queries and keys are interleaved."""
    num_heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
    if num_heads is None:
        return tensor
    halves = tensor.view(num_heads, 2, shape.head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _rope_theta(folder: Path) -> float:
    config = read_object(folder / "config.json")
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _rope_factors(shape: ModelShape, theta: float, architecture: gguf.MODEL_ARCH) -> Tensor | None:
    """What each frequency is divided by, float32 [head_dim / 2]; None if nothing is scaled."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    factors = 1.0 / theta**exponents / torch.tensor(shape.rope_inv_freq)
    is_scaled = not torch.allclose(factors, torch.ones_like(factors), rtol=1e-5, atol=0)
    if shape.rope_attention_scaling != 1.0 or (is_scaled and architecture is not gguf.MODEL_ARCH.LLAMA):
        raise NotHere("the model scales its positions in a way that this .gguf file cannot say")
    return factors if is_scaled else None
