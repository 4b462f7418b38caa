"""In bfloat16 a row's logits are the same to the last bit whatever other rows share the forward.

That makes speculation exact in the default format too: the token that is verified beside three others is
the token that plain decoding computes alone. It rests on two things: oneDNN's packed matrix products treat
every row alike, and attention reads whole blocks of slots (`kernels.attention.READ_BLOCK`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.linear import has_packed_bfloat16
from stages.model.pages import KVHandle
from stages.model.runner import ModelRunner
from stages.model.source import resolve
from stages.model.weights import load_model, random_model
from tests.tiny import tiny_shape

pytestmark = pytest.mark.skipif(
    not has_packed_bfloat16(), reason="needs a CPU with bfloat16 products in oneDNN"
)


def _runner(name: str, page_size: int = 16) -> ModelRunner:
    torch.set_num_threads(1)
    if name == "demo":
        model = load_model(resolve(None), dtype=torch.bfloat16, num_layers=4)
    else:
        shape = replace(tiny_shape(max_position=2048), hidden_size=128, intermediate_size=192)
        model = random_model(shape, seed=3, dtype=torch.bfloat16)
    return ModelRunner(
        shape=model.shape, weights=model.weights, num_slots=2048, page_size=page_size, dtype=torch.bfloat16
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
def test_rows_do_not_depend_on_the_rows_beside_them(model: str, page_size: int) -> None:
    runner = _runner(model, page_size)
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
