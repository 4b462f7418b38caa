"""A linear map whose weight is packed once for the CPU, where `F.linear` would pack it at every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.native.packing import CMatrix, PackedMatrix
from stages.model.cpu_kernels import NativeKernels
from stages.model.weights import Affine


class Linear:
    """y = x W^T + b for rows [T, in].

    With the C kernels the weight is kept in their layout. Without, bfloat16 weights on a CPU with oneDNN are
    kept in its blocked layout; everything else goes through `F.linear`. A packed layout serves every number
    of rows, and gives each the same result beside any others.
    """

    __slots__ = ("_bias", "_kernels", "_native", "_packed", "_weight", "num_outputs")

    def __init__(self, affine: Affine, kernels: NativeKernels | None = None) -> None:
        weight = affine.weight
        self._bias = affine.bias
        self.num_outputs = weight.shape[0]
        self._kernels = kernels
        self._native: PackedMatrix | None = None
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        if kernels is not None:
            self._native = PackedMatrix(weight, affine.bias, kernels.arena, is_int8=kernels.is_int8)
            self._weight = None
        elif weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and has_packed_bfloat16():
            # The hint is a row count; 1 was as fast as any other for 1 to 32 rows.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
            self._weight = None

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self._native is not None:
            assert self._kernels is not None
            return self._native.multiply(self._kernels.library, rows, threads=torch.get_num_threads())
        if self._packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
            return out
        assert self._weight is not None
        return F.linear(rows, self._weight, self._bias)

    @property
    def c_matrix(self) -> CMatrix:
        """The weight as the C kernels take it."""
        assert self._native is not None, "not packed for the C kernels"
        return self._native.c_matrix


def has_packed_bfloat16() -> bool:
    """Whether this CPU multiplies packed bfloat16 matrices; `Linear` falls back to `F.linear` where not."""
    return (
        bool(torch._C._has_mkldnn)
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
