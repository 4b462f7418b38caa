"""Forwards of tiny random models in float64: a row's logits depend on its path and on nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.pages import KVHandle
from stages.model.runner import ModelRunner
from stages.model.shape import ModelShape, tiny_shape
from stages.model.weights import random_model

MAX_ERROR = 1e-12
# Children of the root, forks below them, and a second chain: depths 0 1 1 2 2 2 3 3.
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
SHAPES = {family: tiny_shape(model_type=family, num_layers=3) for family in ("llama", "qwen2", "qwen3")}


def make_runner(
    shape: ModelShape = SHAPES["llama"], *, page_size: int = 4, dtype: torch.dtype = torch.float64
) -> ModelRunner:
    torch.set_num_threads(1)
    model = random_model(shape, seed=7, dtype=dtype)
    return ModelRunner(shape=shape, weights=model.weights, num_slots=640, page_size=page_size, dtype=dtype)


def allocate(runner: ModelRunner, num_slots: int, *, is_fragmented: bool) -> KVHandle:
    if not is_fragmented:
        return runner.kv.allocate(num_slots)
    singles = [runner.kv.allocate(1) for _ in range(runner.kv.num_pages)]
    for handle in singles[1::2]:
        runner.kv.free(handle)
    handle = runner.kv.allocate(num_slots)
    assert handle.first_slot is None or len(handle.pages) == 1
    for other in singles[::2]:
        runner.kv.free(other)
    return handle


def prompt_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chain_rows(kv: KVHandle, start: int, count: int) -> SequenceRows:
    slots = list(range(start, start + count))
    return SequenceRows(kv=kv, prefix_len=start, write_slots=slots, tail_len=count, mask=None)


def forward_chain(runner: ModelRunner, kv: KVHandle, token_ids: list[int], start: int = 0) -> Tensor:
    rows = chain_rows(kv, start, len(token_ids))
    positions = list(range(start, start + len(token_ids)))
    return runner.forward(
        ForwardBatch(token_ids=token_ids, positions=positions, sequences=[rows], logit_rows=None)
    )


def path_to(node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = PARENTS[node]
    return path


def ancestor_mask() -> Tensor:
    mask = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node in range(len(PARENTS)):
        mask[node, path_to(node)] = True
    return mask


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1
    assert (ours - expected).abs().max().item() < MAX_ERROR


@pytest.mark.parametrize("is_fragmented", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", SHAPES)
def test_every_tree_path_equals_its_plain_sequence(family: str, page_size: int, is_fragmented: bool) -> None:
    runner = make_runner(SHAPES[family], page_size=page_size)
    prompt, nodes = prompt_tokens(21), prompt_tokens(len(PARENTS), seed=2)
    kv = allocate(runner, 40, is_fragmented=is_fragmented)
    forward_chain(runner, kv, prompt)
    # Nodes lie in the arena in another order than in the batch: slots are what the mask counts.
    arena = [3, 0, 5, 1, 7, 2, 6, 4]
    mask = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    mask[:, arena] = ancestor_mask()
    rows = SequenceRows(
        kv=kv, prefix_len=21, write_slots=[21 + slot for slot in arena], tail_len=len(PARENTS), mask=mask
    )
    positions = [21 + len(path_to(node)) - 1 for node in range(len(PARENTS))]
    tree = runner.forward(
        ForwardBatch(token_ids=nodes, positions=positions, sequences=[rows], logit_rows=None)
    )
    reference = make_runner(SHAPES[family], page_size=16)
    for node in range(len(PARENTS)):
        fresh = reference.kv.allocate(64)
        path = [nodes[at] for at in path_to(node)]
        assert_equal(tree[node], forward_chain(reference, fresh, prompt + path)[-1])
        reference.kv.free(fresh)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_an_accepted_path_moved_into_place_continues_like_a_plain_sequence(page_size: int) -> None:
    runner = make_runner(page_size=page_size)
    prompt, nodes = prompt_tokens(18), prompt_tokens(len(PARENTS), seed=2)
    kv = allocate(runner, 40, is_fragmented=True)
    forward_chain(runner, kv, prompt)
    slots = list(range(18, 18 + len(PARENTS)))
    rows = SequenceRows(kv=kv, prefix_len=18, write_slots=slots, tail_len=len(PARENTS), mask=ancestor_mask())
    positions = [18 + len(path_to(node)) - 1 for node in range(len(PARENTS))]
    runner.forward(ForwardBatch(token_ids=nodes, positions=positions, sequences=[rows], logit_rows=[0]))
    accepted = path_to(7)
    runner.kv.move(kv, src=[18 + node for node in accepted], dst=list(range(18, 18 + len(accepted))))
    continued = forward_chain(runner, kv, [99, 5], start=18 + len(accepted))
    fresh = runner.kv.allocate(64)
    plain = forward_chain(runner, fresh, prompt + [nodes[node] for node in accepted] + [99, 5])
    assert_equal(continued, plain[-2:])


def test_rows_do_not_depend_on_batch_mates_and_logit_rows_choose_in_order() -> None:
    runner = make_runner()
    prompts = [prompt_tokens(count, seed=count) for count in (1, 9, 70)]
    alone, handles = [], []
    for prompt in prompts:
        kv = runner.kv.allocate(80)
        alone.append(forward_chain(runner, kv, prompt))
        runner.kv.free(kv)
        handles.append(runner.kv.allocate(80))
    together = ForwardBatch(
        token_ids=[token for prompt in prompts for token in prompt],
        positions=[position for prompt in prompts for position in range(len(prompt))],
        sequences=[chain_rows(kv, 0, len(p)) for kv, p in zip(handles, prompts, strict=True)],
        logit_rows=None,
    )
    expected = torch.cat(alone)
    assert_equal(runner.forward(together), expected)
    chosen = ForwardBatch(
        token_ids=together.token_ids,
        positions=together.positions,
        sequences=together.sequences,
        logit_rows=[79, 0, 9],
    )
    assert_equal(runner.forward(chosen), expected[[79, 0, 9]])


def test_a_chain_in_the_last_slots_of_a_longer_tail_sees_the_pending_ones() -> None:
    runner = make_runner()
    tokens = prompt_tokens(20)
    kv = runner.kv.allocate(32)
    forward_chain(runner, kv, tokens[:17])
    rows = SequenceRows(kv=kv, prefix_len=12, write_slots=[17, 18, 19], tail_len=8, mask=None)
    batch = ForwardBatch(token_ids=tokens[17:], positions=[17, 18, 19], sequences=[rows], logit_rows=None)
    ours = runner.forward(batch)
    fresh = runner.kv.allocate(32)
    assert_equal(ours, forward_chain(runner, fresh, tokens)[-3:])


def test_a_masked_slot_that_was_never_written_has_no_effect() -> None:
    runner = make_runner()
    tokens = prompt_tokens(6)
    kv = runner.kv.allocate(32)
    forward_chain(runner, kv, tokens[:5])
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, 9] = True
    rows = SequenceRows(kv=kv, prefix_len=5, write_slots=[14], tail_len=10, mask=mask)
    batch = ForwardBatch(token_ids=tokens[5:], positions=[5], sequences=[rows], logit_rows=None)
    ours = runner.forward(batch)
    fresh = runner.kv.allocate(32)
    assert_equal(ours, forward_chain(runner, fresh, tokens)[-1:])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 9, 16, 33])
def test_packed_bfloat16_weights_give_the_same_logits_as_float32_up_to_rounding(num_rows: int) -> None:
    tokens = prompt_tokens(num_rows)
    logits = {}
    for dtype in (torch.bfloat16, torch.float32):
        runner = make_runner(dtype=dtype)
        logits[dtype] = forward_chain(runner, runner.kv.allocate(64), tokens)
        assert logits[dtype].dtype == torch.float32
    error = (logits[torch.bfloat16] - logits[torch.float32]).abs().mean().item()
    assert error < 0.03 * logits[torch.float32].std().item()


def test_a_batch_that_names_slots_outside_its_handle_is_refused() -> None:
    runner = make_runner()
    kv = runner.kv.allocate(8)
    with pytest.raises(AssertionError, match="the handle has 8"):
        forward_chain(runner, kv, prompt_tokens(9))
    rows = chain_rows(kv, 0, 1)
    with pytest.raises(AssertionError, match="positions"):
        runner.forward(ForwardBatch(token_ids=[1], positions=[512], sequences=[rows], logit_rows=None))
    with pytest.raises(AssertionError, match="token ids"):
        runner.forward(ForwardBatch(token_ids=[128], positions=[0], sequences=[rows], logit_rows=None))


def test_a_warm_up_leaves_the_cache_idle_and_the_results_alone() -> None:
    cold, warm = make_runner(), make_runner()
    warm.warm_up()
    warm.kv.check_integrity()
    tokens = prompt_tokens(9)
    assert torch.equal(
        forward_chain(warm, warm.kv.allocate(9), tokens), forward_chain(cold, cold.kv.allocate(9), tokens)
    )
