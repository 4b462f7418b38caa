"""A linear map whose weight is packed once for the CPU, where `F.linear` would pack it at every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.native.packing import multiply, pack
from stages.model.cpu_kernels import NativeKernels
from stages.model.weights import Affine


class Linear:
    """y = x W^T + b for rows [T, in].

    With the C kernels the weight is kept in their layout. Without, bfloat16 weights on a CPU with oneDNN are
    kept in its blocked layout; everything else goes through `F.linear`. A packed layout serves every number
    of rows, and gives each the same result beside any others.
    """

    __slots__ = ("_kernels", "_packed", "_weight", "bias", "num_outputs")

    def __init__(self, affine: Affine, kernels: NativeKernels | None = None) -> None:
        weight = affine.weight
        self.bias = affine.bias
        self.num_outputs = weight.shape[0]
        self._kernels = kernels
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        if kernels is not None:
            self._packed = pack(weight, kernels.arena)
            self._weight = None
        elif weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and has_packed_bfloat16():
            # The hint is a row count; 1 was as fast as any other for 1 to 32 rows.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
            self._weight = None

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(rows, self._weight, self.bias)
        if self._kernels is not None:
            return multiply(
                self._kernels.library, rows, self._packed, self.bias, threads=torch.get_num_threads()
            )
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out

    @property
    def packed(self) -> Tensor:
        """The weight in the layout of the C kernels."""
        assert self._kernels is not None, "not packed for the C kernels"
        assert self._packed is not None
        return self._packed


def has_packed_bfloat16() -> bool:
    """Whether this CPU multiplies packed bfloat16 matrices; `Linear` falls back to `F.linear` where not."""
    return (
        bool(torch._C._has_mkldnn)
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
