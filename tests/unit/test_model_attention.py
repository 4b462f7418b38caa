"""`attend` against its slow twin, on every path that it chooses between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels.attention
from kernels.attention import attend, attend_reference, plan_visibility

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def random_inputs(num_rows: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 1000 + length)
    shapes = ((num_rows, 6, 16), (2, length, 16), (2, length, 16))
    queries, keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return queries, keys, values


def full_mask(num_rows: int, length: int, tail: Tensor) -> Tensor:
    mask = torch.ones(num_rows, length, dtype=torch.bool)
    mask[:, length - tail.shape[1] :] = tail
    return mask


def check(num_rows: int, length: int, mask: Tensor | None, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    queries, keys, values = random_inputs(num_rows, length, dtype)
    visibility = plan_visibility(num_rows=num_rows, length=length, mask=mask, group_size=3, dtype=dtype)
    tail = torch.ones(num_rows, num_rows, dtype=torch.bool).tril() if mask is None else mask
    expected = attend_reference(queries, keys, values, full_mask(num_rows, length, tail))
    # What is read behind the end of the sequence must not matter.
    behind = torch.full((keys.shape[0], visibility.length - length, keys.shape[2]), 1e4, dtype=dtype)
    keys, values = torch.cat((keys, behind), dim=1), torch.cat((values, behind), dim=1)
    error = (attend(queries, keys, values, visibility) - expected).abs().max().item()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prefix", [0, 1, 37, 600])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 65, 130])
def test_a_causal_chain_after_any_prefix(num_rows: int, prefix: int, dtype: torch.dtype) -> None:
    check(num_rows, prefix + num_rows, None, dtype)


@pytest.mark.parametrize("joint_limit", [0, 1 << 30])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_rows", "tail_len", "prefix"), [(1, 9, 20), (5, 5, 0), (5, 12, 33), (24, 60, 300)]
)
def test_a_mask_over_the_tail_with_and_without_the_joint_bias(
    num_rows: int,
    tail_len: int,
    prefix: int,
    dtype: torch.dtype,
    joint_limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels.attention, "_MAX_JOINT_BIAS", joint_limit)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(num_rows, tail_len, generator=generator) < 0.4
    mask[:, -num_rows:] |= torch.eye(num_rows, dtype=torch.bool)
    check(num_rows, prefix + tail_len, mask, dtype)


def test_a_long_context_is_never_masked_as_a_whole() -> None:
    mask = torch.ones(32, 40, dtype=torch.bool)
    visibility = plan_visibility(num_rows=32, length=100_040, mask=mask, group_size=3, dtype=torch.float32)
    assert visibility.bias is not None
    assert (visibility.dense_len, tuple(visibility.bias.shape)) == (100_000, (96, 40))
