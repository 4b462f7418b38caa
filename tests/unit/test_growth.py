"""What a proposal consists of, what is read for it, and in which order. Worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from conf.schema import SpeculationConfig, TreeConfig
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.growth import Anchor, Shape, add_unread, find_unread, select, settle
from stages.draft_speculator.measures import Measures
from stages.draft_speculator.planner import Planner

LAWS = {
    (): {1: 0.6, 2: 0.3, 3: 0.1},
    (1,): {4: 0.5, 5: 0.4, 6: 0.1},
    (2,): {7: 0.9, 8: 0.1},
    (1, 4): {9: 1.0},
    (2, 7): {9: 0.6, 8: 0.4},
}
"""What follows each path below the root."""


class Law:
    def __init__(self, probs: dict[int, float]) -> None:
        self._probs = probs

    def ranked(self, count: int) -> list[tuple[int, float]]:
        return [(token, math.log(p)) for token, p in list(self._probs.items())[:count]]


def _tree() -> DraftTree:
    tree = DraftTree([50])
    _read(tree, [0])
    return tree


def _read(tree: DraftTree, nodes: list[int]) -> None:
    for node in nodes:
        path = tuple(tree.token_ids[ancestor] for ancestor in reversed(tree.ancestors(node)))
        tree.is_read[node] = True
        tree.next_tokens[node] = Law(LAWS.get(path, {}))


def _shape(**tree: object) -> Shape:
    return Shape.of(SpeculationConfig(depth=3, tree=TreeConfig(**tree)))  # type: ignore[arg-type]


def _grow(
    tree: DraftTree, anchors: list[Anchor], shape: Shape, *, room: int, planner: Planner | None = None
) -> list[int]:
    """Add what is read next; all there is without a planner."""
    unread = find_unread(tree, anchors, shape)
    count = len(unread)
    if planner is not None:
        (count,) = planner.waiting_reads([[node.log_value for node in unread]])
    return add_unread(tree, anchors, unread[:count], room=room)


def _grown(tree: DraftTree, anchors: list[Anchor], shape: Shape) -> list[list[int]]:
    """Tokens read in each step, until nothing is left to read."""
    steps = []
    while nodes := _grow(tree, anchors, shape, room=99, planner=_planner(shape)):
        steps.append([tree.token_ids[node] for node in nodes])
        _read(tree, nodes)
    return steps


def _planner(shape: Shape, min_path_prob: float = 0.0) -> Planner:
    return Planner(shape, Measures(), min_path_prob=min_path_prob, budget=0)


def _tokens(tree: DraftTree, shape: Shape, depth: int = 9) -> list[int]:
    return [entry.token_id for entry in select(tree, tree.root, shape, depth=depth)]


def test_a_chain_follows_the_best_token_and_does_not_read_its_end() -> None:
    tree, shape = _tree(), _shape()
    assert _grown(tree, [Anchor(0, 9)], shape) == [[1], [4]]
    assert _tokens(tree, shape) == [1, 4, 9]


def test_fixed_widths_take_their_children_level_by_level() -> None:
    tree, shape = _tree(), _shape(widths=[2, 1])
    assert _grown(tree, [Anchor(0, 9)], shape) == [[1, 2]]
    assert _tokens(tree, shape) == [1, 2, 4, 7]


def test_best_first_takes_the_likeliest_paths() -> None:
    """1 has .6, 1 4 and 1 4 9 have .3, as 2 has; then come 2 7 with .27 and 1 5 with .24."""
    tree, shape = _tree(), _shape(nodes=5, rows=1)
    steps = _grown(tree, [Anchor(0, 9)], shape)
    assert steps[0] == [1]
    entries = select(tree, 0, shape, depth=9)
    assert {entry.token_id for entry in entries[:4]} == {1, 2, 4, 9}
    assert entries[4].token_id == 7
    assert [round(math.exp(entry.log_value), 2) for entry in entries] == [0.6, 0.3, 0.3, 0.3, 0.27]


@pytest.mark.parametrize("seed", range(20))
def test_best_first_takes_the_likeliest_of_all_nodes_whose_parents_are_read(seed: int) -> None:
    draw, tree = random.Random(seed), DraftTree([50])
    values: dict[tuple[int, ...], float] = {}
    nodes: dict[tuple[int, ...], int] = {(): 0}
    while unread := [path for path, node in nodes.items() if not tree.is_read[node]]:
        for path in unread:
            law = sorted((draw.random() for _ in range(4)), reverse=True)
            tree.is_read[nodes[path]] = True
            tree.next_tokens[nodes[path]] = Law({token: p / 4 for token, p in enumerate(law)})
            for token, p in enumerate(law):
                values[*path, token] = values.get(path, 0.0) + 2 * math.log(p / 4) - 1
                if len(path) < 3 and draw.random() < 0.4:
                    nodes[*path, token] = tree.add(token, nodes[path])
    shape = Shape.of(SpeculationConfig(depth=3, tree=TreeConfig(nodes=12)))
    entries = select(tree, 0, shape, depth=3, valuation=lambda log_prob: 2 * log_prob - 1)
    paths: list[tuple[int, ...]] = []
    for entry in entries:
        path = (*(paths[entry.parent] if entry.parent >= 0 else ()), entry.token_id)
        assert entry.node == nodes.get(path)
        assert entry.log_value == pytest.approx(values[path])
        paths.append(path)
    within = [path for path in values if len(path) <= 3]
    assert paths == sorted(within, key=lambda path: -values[path])[:12]


def test_no_more_levels_than_the_request_can_use() -> None:
    tree, shape = _tree(), _shape(nodes=5)
    assert _grown(tree, [Anchor(0, 1)], shape) == []
    assert _tokens(tree, shape, depth=1) == [1, 2, 3]


def test_an_unfinished_proposal_can_be_served() -> None:
    tree, shape = _tree(), _shape()
    _read(tree, _grow(tree, [Anchor(0, 9)], shape, room=99))
    assert _tokens(tree, shape) == [1, 4]


def test_branches_share_the_rows_of_a_step_by_how_likely_they_are() -> None:
    tree, shape = _tree(), _shape(nodes=5, rows=1)
    first, second = tree.add(1, 0), tree.add(2, 0)
    anchors = [Anchor(first, 9, math.log(0.1)), Anchor(second, 9, math.log(0.8))]
    # The second branch itself, its child 7 with .72, below that 9 (.43) and 8 (.29); then the first, with .1.
    assert _grown(tree, anchors, shape)[:5] == [[2], [7], [9], [8], [1]]


def test_the_rows_of_a_step_are_limited_for_chains_too() -> None:
    tree, shape = _tree(), _shape(rows=1)
    first, second = tree.add(1, 0), tree.add(2, 0)
    anchors = [Anchor(first, 2, math.log(0.1)), Anchor(second, 2, math.log(0.8))]
    assert _grown(tree, anchors, shape) == [[2], [7], [1], [4]]


def test_an_unlikely_path_is_not_read_on() -> None:
    """1 has .6, 1 4 has .3: with 0.5 asked for, 4 is proposed and what may follow it is not looked up."""
    tree, shape = _tree(), _shape()
    planner = _planner(shape, min_path_prob=0.5)
    assert _grow(tree, [Anchor(0, 9)], shape, room=9, planner=planner) == [1]
    _read(tree, [1])
    assert _grow(tree, [Anchor(0, 9)], shape, room=9, planner=planner) == []
    assert _tokens(tree, shape) == [1, 4]


def test_nothing_is_added_without_room() -> None:
    tree, shape = _tree(), _shape(nodes=5)
    assert _grow(tree, [Anchor(0, 9)], shape, room=0) == []
    assert len(tree) == 1


def test_settling_adds_what_is_not_in_the_tree_and_keeps_parents_first() -> None:
    tree, shape = _tree(), _shape(nodes=5, rows=1)
    _grown(tree, [Anchor(0, 9)], shape)
    nodes = settle(tree, 0, select(tree, 0, shape, depth=9))
    tree.submit(nodes)
    assert len(set(nodes)) == 5
    assert all(parent < index for index, parent in enumerate(tree.proposal_parents()))
    assert settle(tree, 0, select(tree, 0, shape, depth=9)) == nodes


def test_a_chain_is_selected_as_a_tree_of_width_one_is():
    """The short way for chains gives what fixed widths give, read or not, and under any valuation."""
    chain = _shape()
    by_level = replace(chain, most_children=2)  # no chain by this number, so it takes the long way
    tree = _tree()
    for nodes in ([], [1], [2]):
        _read(tree, nodes)
        for depth in (1, 2, 3):
            for valuation in (lambda log_prob: log_prob, lambda log_prob: 2 * log_prob - 1):
                short, long = (
                    select(tree, tree.root, shape, depth=depth, valuation=valuation)
                    for shape in (chain, by_level)
                )
                assert short == long
        settle(tree, tree.root, select(tree, tree.root, chain, depth=3))
    assert len(tree) == 4
