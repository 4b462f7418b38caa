"""Chooses what multiplies on a CPU: our C kernels where they can be had, else PyTorch's operators."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, field

import torch

from conf.schema import CpuKernels
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
    arena: Arena = field(default_factory=Arena)


def choose_kernels(choice: CpuKernels, shape: ModelShape, weights: ModelWeights) -> NativeKernels | None:
    """The C kernels for this model, or None for PyTorch's operators.

    Raises `ConfigError` if the C kernels were asked for and cannot be had.
    """
    if choice is CpuKernels.torch:
        return None
    reason = _why_not(shape, weights)
    if reason is None:
        try:
            return NativeKernels(load_native(cache_folder=cache_root()))
        except NativeUnavailableError as error:
            reason = str(error)
            if choice is CpuKernels.auto:
                _log.warning(
                    "the C kernels are not used, PyTorch's operators are (about half as fast): %s", reason
                )
    if choice is CpuKernels.native:
        raise ConfigError(f"model.cpu_kernels=native: {reason}; or set model.cpu_kernels=auto")
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
