"""In bfloat16 a row's logits are the same to the last bit whatever other rows share the forward.

That makes speculation exact in the default format too: the token that is verified beside three others is
the token that plain decoding computes alone. With PyTorch's operators it rests on two things: oneDNN's packed
matrix products treat every row alike, and attention reads whole blocks of slots
(`kernels.attention.READ_BLOCK`). The C kernels promise it for trees as well.
"""

from __future__ import annotations

import random

import pytest
import torch

from conf.schema import CpuKernels
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.linear import has_packed_bfloat16
from stages.model.pages import KVHandle
from stages.model.runner import ModelRunner
from stages.model.source import resolve
from stages.model.weights import load_model, random_model
from tests.native import needs_native, wide_shape

needs_packed = pytest.mark.skipif(
    not has_packed_bfloat16(), reason="needs a CPU with bfloat16 products in oneDNN"
)
KERNELS = [
    pytest.param(CpuKernels.torch, marks=needs_packed),
    pytest.param(CpuKernels.native, marks=needs_native),
]


def _runner(name: str, kernels: CpuKernels, page_size: int = 16) -> ModelRunner:
    torch.set_num_threads(1)
    if name == "demo":
        model = load_model(resolve(None), dtype=torch.bfloat16, num_layers=4)
    else:
        model = random_model(wide_shape(), seed=3, dtype=torch.bfloat16)
    return ModelRunner(
        shape=model.shape,
        weights=model.weights,
        num_slots=2048,
        page_size=page_size,
        dtype=torch.bfloat16,
        cpu_kernels=kernels,
    )


def _rows(handle: KVHandle, start: int, count: int) -> SequenceRows:
    slots = list(range(start, start + count))
    return SequenceRows(kv=handle, prefix_len=start, write_slots=slots, tail_len=count, mask=None)


def _forward(runner: ModelRunner, tokens: list[int], *parts: tuple[KVHandle, int, int]) -> torch.Tensor:
    """Logits of rows start..start+count-1 of each (handle, start, count), in one forward."""
    spans = [range(start, start + count) for _, start, count in parts]
    return runner.forward(
        ForwardBatch(
            token_ids=[tokens[i] for span in spans for i in span],
            positions=[i for span in spans for i in span],
            sequences=[_rows(*part) for part in parts],
            logit_rows=None,
        )
    )


@pytest.mark.parametrize("model", ["tiny", pytest.param("demo", marks=pytest.mark.demo)])
@pytest.mark.parametrize("page_size", [16, 4])
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_do_not_depend_on_the_rows_beside_them(model: str, page_size: int, kernels: CpuKernels) -> None:
    runner = _runner(model, kernels, page_size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, runner.shape.vocab_size, (600,), generator=generator).tolist()
    handle, mate = runner.kv.allocate(600), runner.kv.allocate(300)
    _forward(runner, tokens, (mate, 0, 150))
    read = 0
    for start in (1, 63, 64, 127, 250, 505, 511):
        _forward(runner, tokens, (handle, read, start - read))
        read = start
        alone = torch.cat([_forward(runner, tokens, (handle, start + k, 1)) for k in range(12)])
        for count in (1, 2, 3, 5, 8, 12):
            together = _forward(runner, tokens, (handle, start, count))
            assert torch.equal(together, alone[:count]), (start, count)
        in_a_batch = _forward(runner, tokens, (mate, 150, 5), (handle, start, 5))
        assert torch.equal(in_a_batch[5:], alone[:5]), start


@needs_native
@pytest.mark.parametrize("model", ["tiny", pytest.param("demo", marks=pytest.mark.demo)])
def test_a_node_of_a_tree_is_what_its_path_is_alone(model: str) -> None:
    runner = _runner(model, CpuKernels.native)
    draw = random.Random(4)
    vocab_size = runner.shape.vocab_size
    tree, alone = runner.kv.allocate(400), runner.kv.allocate(400)
    prompt = [draw.randrange(vocab_size) for _ in range(301)]
    for handle in (tree, alone):
        _forward(runner, prompt, (handle, 0, 301))
    for size in (5, 16, 40):
        tokens = [draw.randrange(vocab_size) for _ in range(size)]
        parents = [-1, *(draw.randrange(node) for node in range(1, size))]
        mask = torch.eye(size, dtype=torch.bool)
        depths = [0] * size
        for node in range(1, size):
            mask[node] |= mask[parents[node]]
            depths[node] = depths[parents[node]] + 1
        slots = list(range(301, 301 + size))
        rows = SequenceRows(kv=tree, prefix_len=301, write_slots=slots, tail_len=size, mask=mask)
        logits = runner.forward(
            ForwardBatch(
                token_ids=tokens, positions=[301 + d for d in depths], sequences=[rows], logit_rows=None
            )
        )
        for node in range(size):
            path = mask[node].nonzero().flatten().tolist()
            chain = [*prompt, *(tokens[ancestor] for ancestor in path)]
            expected = [_forward(runner, chain, (alone, 301 + k, 1)) for k in range(len(path))][-1]
            assert torch.equal(logits[node], expected[0]), (size, node)


@needs_native
def test_a_long_prompt_and_many_short_ones_in_one_forward_are_what_they_are_alone() -> None:
    runner = _runner("tiny", CpuKernels.native)
    draw = random.Random(5)
    tokens = [draw.randrange(runner.shape.vocab_size) for _ in range(400)]
    handles = [runner.kv.allocate(100) for _ in range(13)]
    long = runner.kv.allocate(400)
    expected = [_forward(runner, tokens, (handle, 0, 6)) for handle in handles]
    expected.insert(5, _forward(runner, tokens, (long, 0, 300)))
    parts = [(handle, 0, 6) for handle in handles]
    parts.insert(5, (long, 0, 300))
    assert torch.equal(_forward(runner, tokens, *parts), torch.cat(expected))
    wanted = [3, 320, 31, 40]
    together = runner.forward(
        ForwardBatch(
            token_ids=[tokens[i] for _, start, count in parts for i in range(start, start + count)],
            positions=[i for _, start, count in parts for i in range(start, start + count)],
            sequences=[_rows(*part) for part in parts],
            logit_rows=wanted,
        )
    )
    assert torch.equal(together, torch.cat(expected)[wanted])


@needs_native
@pytest.mark.parametrize("step", [1, 7, 200])
@pytest.mark.parametrize("page_size", [16, 4])
def test_a_beginning_that_was_read_before_gives_the_same_bits(step: int, page_size: int) -> None:
    """However many rows it was read in, and wherever its pages lie: up to `MAX_SEQUENCE_ROWS` at once."""
    runner = _runner("tiny", CpuKernels.native, page_size)
    runner.kv.keeps_prefixes = True
    draw = random.Random(6)
    tokens = [draw.randrange(runner.shape.vocab_size) for _ in range(230)]
    alone = runner.kv.allocate(230)
    expected = _forward(runner, tokens, (alone, 0, 230))
    earlier = runner.kv.allocate(200, token_ids=tokens[:200])
    runner.kv.allocate(1)
    for start in range(0, 200, step):
        _forward(runner, tokens, (earlier, start, min(step, 200 - start)))
    runner.kv.keep(earlier, tokens[:200])
    later = runner.kv.allocate(230, token_ids=tokens)
    assert later.num_cached == 200 // page_size * page_size
    assert later.first_slot is None, "the pages behind are held"
    rest = 230 - later.num_cached
    assert torch.equal(_forward(runner, tokens, (later, later.num_cached, rest)), expected[-rest:])
