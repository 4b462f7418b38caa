"""Chains that no draft stands behind, beside a proposal and without one."""

from __future__ import annotations

from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.fillers import hang, random_tokens


def _tree() -> tuple[DraftTree, list[int]]:
    """Root 50, below it 1 - 2 - 3, of which 1 and 2 are proposed."""
    tree = DraftTree([50])
    first = tree.add(1, tree.root)
    second = tree.add(2, first)
    tree.add(3, second)
    return tree, [first, second]


def _paths(tree: DraftTree, nodes: list[int]) -> list[list[int]]:
    return [[tree.token_ids[a] for a in reversed(tree.ancestors(node))] for node in nodes]


def test_a_chain_goes_on_where_it_agrees_with_the_proposal() -> None:
    tree, proposal = _tree()
    added = hang(tree, proposal, [1, 2, 3, 4], most=9)
    assert _paths(tree, added) == [[1, 2, 3], [1, 2, 3, 4]]
    assert added[0] == 3, "the draft had read it and left it out"


def test_a_chain_branches_off_where_it_does_not() -> None:
    tree, proposal = _tree()
    assert _paths(tree, hang(tree, proposal, [1, 7, 8], most=9)) == [[1, 7], [1, 7, 8]]
    assert _paths(tree, hang(tree, proposal, [9], most=9)) == [[9]]


def test_no_more_nodes_than_allowed_and_none_for_what_is_proposed() -> None:
    tree, proposal = _tree()
    assert _paths(tree, hang(tree, proposal, [7, 8, 9], most=2)) == [[7], [7, 8]]
    assert hang(tree, proposal, [1, 2], most=9) == []


def test_random_tokens_come_from_the_text_and_are_the_same_every_time() -> None:
    text = [3, 5, 8, 13]
    drawn = random_tokens(text, seed=7, position=40, count=200)
    assert set(drawn) == set(text)
    assert drawn == random_tokens(text, seed=7, position=40, count=200)
    assert drawn[10:] == random_tokens(text, seed=7, position=50, count=190)
    assert drawn != random_tokens(text, seed=8, position=40, count=200)
    assert random_tokens([], seed=7, position=40, count=3) == []
