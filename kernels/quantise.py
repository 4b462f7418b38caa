"""Weights as int8 with a scale for each row: how drafts are stored, and what the C kernels may read."""

from __future__ import annotations

import torch
from torch import Tensor


def quantise_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and float32 scale [out]; int8 * scale is off by half a scale at most."""
    values = matrix.to(torch.float32)
    scale = values.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
    return (values / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale
