"""The draft's tree: catching up, branches, and what an outcome keeps."""

from __future__ import annotations

import random

import pytest

from stages.draft_speculator.draft_tree import DraftTree


def _read(tree: DraftTree, *nodes: int) -> None:
    for node in nodes:
        tree.is_read[node] = True


def _round(prompt: list[int]) -> DraftTree:
    """A prompt that is read, and a submitted chain 101, 102 of which only 101 is read."""
    tree = DraftTree(prompt)
    _read(tree, *range(len(prompt)))
    tree.drop_read_prefix()
    first = tree.add(101, tree.root)
    second = tree.add(102, first)
    _read(tree, first)
    tree.submit([first, second])
    return tree


def test_a_read_prompt_leaves_only_the_root() -> None:
    tree = DraftTree([7, 8, 9])
    assert tree.unread_committed() == [0, 1, 2]
    _read(tree, 0, 1, 2)
    tree.drop_read_prefix()
    assert (tree.prefix_len, tree.token_ids, tree.root, tree.committed_len) == (2, [9], 0, 3)


def test_positions_and_depths_count_from_the_root() -> None:
    tree = _round([7, 8, 9])
    assert [tree.positions[node] for node in range(3)] == [2, 3, 4]
    assert [tree.depth(node) for node in range(3)] == [0, 1, 2]
    assert tree.proposal_parents() == [-1, 0]


def test_a_hit_keeps_the_branch_and_moves_its_kv_behind_the_committed_tokens() -> None:
    tree = _round([7, 8, 9])
    _read(tree, 2)
    other = tree.add_branch(-1, 55)
    bonus = tree.add_branch(0, 66)
    assert other is not None
    assert bonus is not None
    drafted = tree.add(67, bonus)
    _read(tree, bonus)
    result = tree.reroot(0, 66)
    # Slots: root 2, 101 at 3, 102 at 4, 55 at 5, 66 at 6, 67 (unread) at 7.
    assert (result.moved_from, result.moved_to) == ([6], [4])
    tree.drop_read_prefix()
    assert tree.token_ids == [66, 67]
    assert (tree.prefix_len, tree.root, tree.committed_len) == (4, 0, 5)
    assert tree.is_read == [True, False]
    assert tree.subtree(tree.root) == [1]
    assert drafted == 5


def test_a_miss_keeps_the_accepted_path_and_an_unread_root() -> None:
    tree = _round([7, 8, 9])
    result = tree.reroot(1, 77)
    assert (result.moved_from, result.moved_to) == ([], [])
    tree.drop_read_prefix()
    # 102 was never read: it waits before the root, as a committed token to catch up on.
    assert tree.token_ids == [102, 77]
    assert tree.unread_committed() == [0, 1]
    assert (tree.prefix_len, tree.root, tree.committed_len) == (4, 1, 6)


def test_a_proposed_child_is_no_branch_and_an_open_branch_stays_one() -> None:
    tree = _round([7, 8, 9])
    assert tree.add_branch(-1, 101) is None
    assert tree.add_branch(0, 102) is None
    opened = tree.add_branch(0, 101)
    assert opened is not None
    assert tree.add_branch(0, 101) == opened
    # Nothing is excluded after the last node.
    assert tree.add_branch(1, 102) is not None


def test_what_was_read_and_left_out_of_the_proposal_is_kept_when_it_comes_true() -> None:
    tree = _round([7, 8, 9])
    left_out = tree.add(103, 1)
    _read(tree, 2, left_out)
    below = tree.add(104, left_out)
    result = tree.reroot(0, 103)
    # Slots: root 2, 101 at 3, 102 at 4, 103 at 5, 104 (unread) at 6.
    assert (result.moved_from, result.moved_to) == ([5], [4])
    tree.drop_read_prefix()
    assert tree.token_ids == [103, 104]
    assert below == 4


@pytest.mark.parametrize("seed", range(20))
def test_random_outcomes_keep_tokens_and_kv_together(seed: int) -> None:
    """A shadow KV, slot -> path of tokens, is moved as told; every read node must find its own path there."""
    draw = random.Random(seed)
    committed = [draw.randrange(9) for _ in range(4)]
    tree = DraftTree(committed)
    slots: dict[int, list[int]] = {}

    def path(node: int) -> list[int]:
        return committed + [tree.token_ids[a] for a in reversed(tree.ancestors(node))]

    def read(nodes: list[int]) -> None:
        for node in nodes:
            tree.is_read[node] = True
            full = path(node) if node > tree.root else committed[: tree.prefix_len + node + 1]
            slots[tree.prefix_len + node] = full

    for _ in range(30):
        read(tree.unread_committed())
        tree.drop_read_prefix()
        tip, chain = tree.root, []
        for _ in range(draw.randrange(4)):
            tip = tree.add(draw.randrange(9), tip)
            chain.append(tip)
        read(chain if draw.random() < 0.5 else chain[:-1])
        tree.submit(chain)
        opened = []
        if all(tree.is_read[node] for node in chain):
            for outcome in {(draw.randrange(-1, len(chain)), draw.randrange(9)) for _ in range(6)}:
                branch = tree.add_branch(*outcome)
                if branch is not None:
                    opened.append(outcome)
                    below = tree.add(draw.randrange(9), branch)
                    read([branch, below] if draw.random() < 0.5 else [branch])
        accepted, bonus = draw.choice(opened or [(draw.randrange(-1, len(chain)), 8)])
        new = [*path(tree.proposal_node(accepted))[len(committed) :], bonus]
        rerooting = tree.reroot(accepted, bonus)
        values = [slots[slot] for slot in rerooting.moved_from]
        slots.update(zip(rerooting.moved_to, values, strict=True))
        tree.drop_read_prefix()
        committed = committed + new
        assert tree.committed_len == len(committed)
        assert tree.token_ids[tree.root] == bonus
        for slot in range(tree.prefix_len):
            assert slots[slot] == committed[: slot + 1]
        for node in range(tree.root + 1, len(tree)):
            if tree.is_read[node]:
                assert slots[tree.prefix_len + node] == path(node)
