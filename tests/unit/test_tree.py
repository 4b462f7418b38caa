"""Token trees as index lists."""

from __future__ import annotations

import pytest

from kernels.tree import accept_path, ancestor_rows, check_tree, node_depths

#        root
#       /    \
#      0      1
#     / \      \
#    2   3      4
PARENTS = [-1, -1, 0, 0, 1]
TOKENS = [10, 11, 12, 13, 10]


def test_depths_count_from_the_root() -> None:
    assert node_depths(PARENTS) == [1, 1, 2, 2, 2]


def test_the_ancestor_mask_shows_a_node_its_path_only() -> None:
    rows = ancestor_rows(PARENTS)
    visible = [[column - 1 for column, seen in enumerate(row) if seen] for row in rows]
    assert visible == [[-1], [-1, 0], [-1, 1], [-1, 0, 2], [-1, 0, 3], [-1, 1, 4]]


@pytest.mark.parametrize(
    ("choices", "accepted", "bonus"),
    [
        ([99, 0, 0, 0, 0, 0], [], 99),
        ([10, 13, 0, 0, 7, 0], [0, 3], 7),
        ([10, 99, 0, 0, 0, 0], [0], 99),
        ([11, 0, 10, 0, 0, 42], [1, 4], 42),
    ],
)
def test_the_walk_accepts_children_that_are_the_targets_choice(
    choices: list[int], accepted: list[int], bonus: int
) -> None:
    assert accept_path(choices, TOKENS, PARENTS) == (accepted, bonus)


def test_an_empty_tree_yields_the_bonus_alone() -> None:
    assert accept_path([3], [], []) == ([], 3)


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ([1, 2], [-1], "2 tokens but 1 parents"),
        ([1, 2], [-1, 1], "parents come before"),
        ([1, 2], [-1, -2], "has parent -2"),
        ([1, 50], [-1, 0], "outside the vocabulary"),
        ([1, -3], [-1, 0], "outside the vocabulary"),
        ([1, 1], [-1, -1], "two children with token 1"),
    ],
)
def test_a_bad_tree_is_described(tokens: list[int], parents: list[int], words: str) -> None:
    fault = check_tree(tokens, parents, vocab_size=50)
    assert fault is not None
    assert words in fault


def test_a_good_tree_has_no_fault() -> None:
    assert check_tree(TOKENS, PARENTS, vocab_size=50) is None
