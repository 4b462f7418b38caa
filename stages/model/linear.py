"""A linear map whose weight is packed once for the CPU, where `F.linear` would pack it at every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.model.weights import Affine


class Linear:
    """y = x W^T + b for rows [T, in].

    bfloat16 weights on a CPU with oneDNN are kept in its blocked layout, which halves the time of small
    batches; everything else goes through `F.linear`. The packed layout serves every number of rows.
    """

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, affine: Affine) -> None:
        weight = affine.weight
        self._bias = affine.bias
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and has_packed_bfloat16():
            # The hint is a row count; 1 was as fast as any other for 1 to 32 rows.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
            self._weight = None

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self._packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
            return out
        assert self._weight is not None
        return F.linear(rows, self._weight, self._bias)


def has_packed_bfloat16() -> bool:
    """Whether this CPU multiplies packed bfloat16 matrices; `Linear` falls back to `F.linear` where not."""
    return (
        bool(torch._C._has_mkldnn)
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
