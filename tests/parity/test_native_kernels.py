"""The C kernels against PyTorch's operators, and what happens where they cannot be had."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import CpuKernels
from kernels.native import build
from kernels.native.build import NativeUnavailableError, load_native
from kernels.native.packing import Arena, PackedMatrix
from kernels.quantise import quantise_rows
from pipeline.errors import ConfigError
from stages.model import cpu_kernels
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.runner import ModelRunner
from stages.model.shape import ModelShape
from stages.model.weights import LoadedModel, random_model
from tests.native import needs_native, wide_shape

INSTRUCTION_SETS = [("-DSSD_NO_AMX",), ("-DSSD_NO_AMX", "-mno-avx512bf16"), ("-DSSD_NO_AMX", "-mno-avx512f")]
"""What makes the compiler do without AMX, then without bfloat16, then without AVX-512."""


def _shape(kind: str) -> ModelShape:
    plain = wide_shape()
    return {
        "llama": plain,
        "biases": replace(plain, qkv_bias=True, o_bias=True, mlp_bias=True),
        "head norms": replace(plain, qk_norm=True),
        "head size 96": wide_shape(head_dim=96),
        "one key head": replace(plain, num_kv_heads=1),
    }[kind]


def _logits(model: LoadedModel, kernels: CpuKernels, lengths: list[int]) -> torch.Tensor:
    """Of the same tokens in forwards of the given lengths, one after another."""
    torch.set_num_threads(1)
    runner = ModelRunner.with_pages(model, num_pages=32, page_size=16, cpu_kernels=kernels)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.shape.vocab_size, (sum(lengths),), generator=generator).tolist()
    handle = runner.kv.allocate(512)
    out, start = [], 0
    for length in lengths:
        slots = list(range(start, start + length))
        rows = SequenceRows(kv=handle, prefix_len=start, write_slots=slots, tail_len=length, mask=None)
        batch = ForwardBatch(
            token_ids=tokens[start : start + length], positions=slots, sequences=[rows], logit_rows=None
        )
        out.append(runner.forward(batch))
        start += length
    return torch.cat(out)


@needs_native
@pytest.mark.parametrize("kind", ["llama", "biases", "head norms", "head size 96", "one key head"])
def test_they_err_no_more_than_pytorchs_operators(kind: str) -> None:
    lengths = [40, 1, 1, 7, 3, 20, 1, 64, 5, 70, 2]
    model = random_model(_shape(kind), seed=3, dtype=torch.bfloat16)
    exact = _logits(_widened(model), CpuKernels.torch, lengths)
    theirs = (_logits(model, CpuKernels.torch, lengths) - exact).abs()
    ours = (_logits(model, CpuKernels.native, lengths) - exact).abs()
    assert theirs.max() > 0
    assert ours.mean() < 1.1 * theirs.mean()
    assert ours.max() < 1.5 * theirs.max()


def _widened(model: LoadedModel) -> LoadedModel:
    """The same weights in float64."""

    def wide(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.double()
        if isinstance(value, list):
            return [wide(item) for item in value]
        if hasattr(value, "__dataclass_fields__"):
            return replace(value, **{name: wide(getattr(value, name)) for name in value.__dataclass_fields__})
        return value

    weights = wide(model.weights)
    return replace(model, weights=weights)


@needs_native
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("outputs", [16, 48, 272])
@pytest.mark.parametrize("is_int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("flags", [(), *INSTRUCTION_SETS])
def test_products_are_rounded_sums_with_every_instruction_set(
    tmp_path_factory: pytest.TempPathFactory, rows: int, outputs: int, is_int8: bool, flags: tuple[str, ...]
) -> None:
    library = load_native(cache_folder=Path(tmp_path_factory.getbasetemp()) / "kernels", flags=flags)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, 96, generator=generator).bfloat16()
    x = torch.randn(rows, 96, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16()
    packed = PackedMatrix(weight, bias, Arena(), is_int8=is_int8)
    if is_int8:
        values, scales = quantise_rows(weight)
        weight = values.double() * scales[:, None]
    result = packed.multiply(library, x, threads=1)
    exact = x.double() @ weight.double().T + bias.double()
    # Half a unit in the last of eight bits, and a little for float32 sums.
    assert ((result.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()
    for row in range(rows):
        assert torch.equal(packed.multiply(library, x[row : row + 1], threads=1)[0], result[row])
    assert torch.equal(packed.multiply(library, x, threads=2), result)


@needs_native
def test_two_threads_compute_the_same_bits() -> None:
    model = random_model(_shape("llama"), seed=3, dtype=torch.bfloat16)
    one = _logits(model, CpuKernels.native, [50, 6])
    torch.set_num_threads(2)
    try:
        assert torch.equal(_logits(model, CpuKernels.native, [50, 6]), one)
    finally:
        torch.set_num_threads(1)


def _without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "_NEEDED", frozenset())
    monkeypatch.setattr(cpu_kernels, "cache_root", lambda: tmp_path / "cache")


def test_without_a_compiler_pytorch_takes_over_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _without_compiler(monkeypatch, tmp_path)
    model = random_model(_shape("llama"), seed=3, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert cpu_kernels.choose_kernels(CpuKernels.auto, model.shape, model.weights) is None
    assert "no C compiler: install gcc, or set CC" in caplog.text


def test_kernels_that_were_asked_for_and_cannot_be_had_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _without_compiler(monkeypatch, tmp_path)
    model = random_model(_shape("llama"), seed=3, dtype=torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"model.cpu_kernels=native: there is no C compiler.*leave model.cpu_kernels out"
    ):
        cpu_kernels.choose_kernels(CpuKernels.native, model.shape, model.weights)
    wrong = random_model(_shape("llama"), seed=3, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"expected model.dtype=bfloat16, got float32"):
        cpu_kernels.choose_kernels(CpuKernels.native, wrong.shape, wrong.weights)


@needs_native
def test_a_compiler_that_fails_is_reported_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "_NEEDED", frozenset())
    with pytest.raises(NativeUnavailableError, match="could not compile"):
        load_native(cache_folder=tmp_path / "cache", flags=("-no-such-flag",))
    assert list((tmp_path / "cache").iterdir()) == []
