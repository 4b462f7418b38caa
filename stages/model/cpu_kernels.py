"""Chooses what multiplies on a CPU: our C kernels where they can be had, else PyTorch's operators."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, field

import torch

from conf.schema import CpuKernels, WeightFormat
from kernels.native.build import NativeUnavailableError, load_native
from kernels.native.packing import Arena, can_pack
from pipeline.errors import ConfigError
from stages.model.cache_folder import cache_root
from stages.model.shape import ModelShape
from stages.model.weights import ModelWeights

_log = logging.getLogger(__name__)

_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The C library, and the memory that one model's packed weights are put in."""

    library: ctypes.CDLL
    is_int8: bool = False
    """Matrices are rounded to int8 with a scale a row when they are packed."""
    arena: Arena = field(default_factory=Arena)


def choose_kernels(
    choice: CpuKernels,
    shape: ModelShape,
    weights: ModelWeights,
    *,
    weight_format: WeightFormat = WeightFormat.dtype,
    is_format_binding: bool = False,
) -> NativeKernels | None:
    """The C kernels for this model, or None for PyTorch's operators.

    weight_format: int8 needs the C kernels; without them it is left aside, unless it is binding.
    Raises `ConfigError` if the C kernels are needed and cannot be had.
    """
    needed = "model.cpu_kernels=native" if choice is CpuKernels.native else None
    if is_format_binding and weight_format is WeightFormat.int8:
        needed = "model.weights=int8"
        if choice is CpuKernels.torch:
            raise ConfigError(f"{needed}: only the C kernels read int8; set model.cpu_kernels=auto")
    if choice is CpuKernels.torch:
        return None
    reason = _why_not(shape, weights)
    if reason is None:
        try:
            library = load_native(cache_folder=cache_root())
            return NativeKernels(library, is_int8=weight_format is WeightFormat.int8)
        except NativeUnavailableError as error:
            reason = str(error)
            if needed is None:
                _log.warning(
                    "the C kernels are not used, PyTorch's operators are (several times slower): %s",
                    reason,
                )
    if needed is not None:
        raise ConfigError(f"{needed}: {reason}; or leave {needed.split('=')[0]} out")
    return None


def _why_not(shape: ModelShape, weights: ModelWeights) -> str | None:
    """Why the C kernels do not fit this model, None if they do."""
    if weights.embed.device.type != "cpu":
        return f"expected a model on a CPU, it is on {weights.embed.device}"
    if weights.embed.dtype != torch.bfloat16:
        return f"expected model.dtype=bfloat16, got {str(weights.embed.dtype).removeprefix('torch.')}"
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv.weight, layer.o.weight, layer.gate_up.weight, layer.down.weight]
    odd = next((weight for weight in matrices if not can_pack(weight)), None)
    if odd is not None:
        return f"expected matrices [multiple of 16, multiple of 32], this model has {tuple(odd.shape)}"
    if shape.head_dim % 32 or shape.head_dim > _MAX_HEAD_DIM:
        return f"expected a head size that is a multiple of 32 up to {_MAX_HEAD_DIM}, got {shape.head_dim}"
    return None
