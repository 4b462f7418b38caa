"""Whether this machine has the C kernels, and shapes that suit them, for tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.native.build import NativeUnavailableError, load_native
from stages.model.cache_folder import cache_root
from stages.model.shape import ModelShape
from tests.tiny import tiny_shape


def why_no_native() -> str:
    """Empty where the C kernels can be had."""
    try:
        load_native(cache_folder=cache_root())
    except NativeUnavailableError as error:
        return str(error)
    return ""


REASON = why_no_native()
needs_native = pytest.mark.skipif(REASON != "", reason=f"no C kernels: {REASON}")


def wide_shape(*, head_dim: int = 32, max_position: int = 2048) -> ModelShape:
    """A tiny model whose sizes are multiples of 32."""
    frequencies = tuple(10000.0 ** (-2 * index / head_dim) for index in range(head_dim // 2))
    return replace(
        tiny_shape(max_position=max_position),
        hidden_size=128,
        intermediate_size=192,
        head_dim=head_dim,
        rope_inv_freq=frequencies,
    )
