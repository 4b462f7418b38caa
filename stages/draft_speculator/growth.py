"""How a proposal grows below a node: which of the tokens that may follow are in it, and what to read next.

A *selection* is the best proposal that what has been read so far allows. It is worked out anew whenever it
is needed, from `DraftTree.next_tokens`: nothing has to be kept or undone when an outcome re-roots the tree,
and an unfinished selection can be served at any moment. Three shapes, one rule:

- a chain of K tokens: one child a node;
- fixed widths: the best widths[d] children of every node at depth d;
- best first (as EAGLE-2, arXiv 2406.16858, ranks its nodes): the N nodes with the likeliest paths. A node's
  probability is that of its parent times the draft's for the token, under the shared noise.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

from conf.proposal_size import proposal_depth, proposal_nodes, rows_of_a_step
from conf.schema import SpeculationConfig
from stages.draft_speculator.draft_tree import DraftTree

_MOST_CHILDREN = 8
"""Children of a node that best first considers."""
_ALL = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The form of the proposals of a run; a planner may ask for a smaller one in some rounds."""

    depth: int
    """K: levels below the root."""
    widths: tuple[int, ...] | None
    """Children of a node by its depth, one number a level; None: best first."""
    most_children: int
    """Of any node."""
    num_nodes: int
    """Most nodes of a proposal."""
    rows: int
    """Most nodes read in one step, the branches of a request together."""

    @classmethod
    def of(cls, speculation: SpeculationConfig) -> Shape:
        """The shape that a configuration asks for. A chain is a tree of width 1."""
        num_nodes, depth = proposal_nodes(speculation), proposal_depth(speculation)
        tree, rows = speculation.tree, rows_of_a_step(speculation) or _ALL
        if tree.widths is None and tree.nodes is not None:
            most = min(_MOST_CHILDREN, num_nodes)
            return cls(depth=depth, widths=None, most_children=most, num_nodes=num_nodes, rows=rows)
        widths = tuple(tree.widths or [1] * depth)
        return cls(depth=depth, widths=widths, most_children=max(widths), num_nodes=num_nodes, rows=rows)

    def as_chain(self) -> Shape:
        """One child a node, as deep."""
        depth = min(self.depth, self.num_nodes)
        return replace(self, depth=depth, widths=(1,) * depth, most_children=1, num_nodes=depth)

    @property
    def is_chain(self) -> bool:
        """Whether no node has more than one child."""
        return self.widths is not None and self.most_children == 1


Valuation = Callable[[float], float]
"""From the draft's log-probability of a token to the logarithm of what it counts for in the ranking."""


def as_the_draft_has_it(log_prob: float) -> float:
    """The plain valuation."""
    return log_prob


class Entry(NamedTuple):
    """One node of a selection."""

    parent: int
    """Index of its parent in the selection, -1 for the node that it grows below."""
    token_id: int
    log_prob: float
    """Of the token after its parent, as the draft has it."""
    log_value: float
    """Sum of the valuations down the path to it."""
    depth: int
    node: int | None
    """Its tree index, if it is in the tree."""


@dataclass(slots=True)
class Anchor:
    """A node that a proposal grows below: the root, or the bonus token of a branch."""

    node: int
    depth: int
    """Levels worth growing."""
    log_value: float = 0.0
    """Log of how likely it is that this proposal will be asked for."""
    selection: list[Entry] | None = None
    """What `find_unread` last worked out, while nothing of it was read since."""
    chain: list[Entry] = field(default_factory=list)
    """Of a chain, what stays of the selection when more of it was read: its end is all that changes."""


def select(
    tree: DraftTree,
    anchor: int,
    shape: Shape,
    *,
    depth: int,
    valuation: Valuation = as_the_draft_has_it,
    children: dict[tuple[int, int], int] | None = None,
) -> list[Entry]:
    """The proposal below `anchor`, parents first; at most `depth` levels, and no more than the shape's.

    children: `tree.children()`, where the caller has it.
    """
    limit = min(depth, shape.depth)
    if children is None:
        children = tree.children()
    if shape.is_chain:
        return _select_chain(tree, anchor, min(limit, shape.num_nodes), valuation, children)
    if shape.widths is None:
        return _select_best(tree, anchor, shape, limit, valuation, children)
    entries: list[Entry] = []
    parents: list[tuple[int, int, float]] = [(-1, anchor, 0.0)]
    for level in range(limit):
        first = len(entries)
        for index, node, log_value in parents:
            following = tree.next_tokens[node]
            ranked = following.ranked(shape.widths[level]) if following is not None else []
            for token, log_prob in ranked[: shape.num_nodes - len(entries)]:
                path = log_value + valuation(log_prob)
                entries.append(Entry(index, token, log_prob, path, level + 1, children.get((node, token))))
        parents = [
            (index, entry.node, entry.log_value)
            for index, entry in enumerate(entries[first:], start=first)
            if entry.node is not None
        ]
    return entries


def _select_best(
    tree: DraftTree,
    anchor: int,
    shape: Shape,
    limit: int,
    valuation: Valuation,
    children: dict[tuple[int, int], int],
) -> list[Entry]:
    """`select`, best first. limit: most levels.

    A token is looked at when the one that is ranked before it has been taken: valuations keep the order.
    """
    entries: list[Entry] = []
    top = Entry(-1, -1, 0.0, 0.0, 0, anchor)
    queue: list[tuple[float, int, int, list[tuple[int, float]], int]] = []
    num_queued = 0

    def look_at(index: int, parent: Entry, ranked: list[tuple[int, float]], rank: int) -> None:
        """Queue the token of this rank after an entry; index: the entry's."""
        nonlocal num_queued
        if rank < len(ranked):
            log_value = parent.log_value + valuation(ranked[rank][1])
            # Ties keep the order in which they came.
            heapq.heappush(queue, (-log_value, num_queued, index, ranked, rank))
            num_queued += 1

    def look_below(index: int, entry: Entry) -> None:
        if entry.node is None or entry.depth >= limit:
            return
        following = tree.next_tokens[entry.node]
        if following is not None:
            look_at(index, entry, following.ranked(shape.most_children), 0)

    look_below(-1, top)
    while queue and len(entries) < shape.num_nodes:
        value, _, index, ranked, rank = heapq.heappop(queue)
        parent = entries[index] if index >= 0 else top
        token, log_prob = ranked[rank]
        assert parent.node is not None, "what has children is in the tree"
        entry = Entry(index, token, log_prob, -value, parent.depth + 1, children.get((parent.node, token)))
        entries.append(entry)
        look_at(index, parent, ranked, rank + 1)
        look_below(len(entries) - 1, entry)
    return entries


def _select_chain(
    tree: DraftTree,
    anchor: int,
    limit: int,
    valuation: Valuation,
    children: dict[tuple[int, int], int],
    chain: Sequence[Entry] = (),
) -> list[Entry]:
    """`select` where every node has one child: no queue is needed, and a step asks for many chains.

    limit: most entries. chain: its first ones, where they are known.
    """
    entries = list(chain)
    node: int | None = entries[-1].node if entries else anchor
    log_value = entries[-1].log_value if entries else 0.0
    while node is not None and len(entries) < limit:
        following = tree.next_tokens[node]
        best = following.ranked(1) if following is not None else []
        if not best:
            break
        token, log_prob = best[0]
        log_value += valuation(log_prob)
        node = children.get((node, token))
        entries.append(Entry(len(entries) - 1, token, log_prob, log_value, len(entries) + 1, node))
    return entries


class Unread(NamedTuple):
    """A node that could be read next."""

    log_value: float
    """Of its path, from the committed tokens."""
    anchor: int
    """Which of the anchors it is below."""
    entry: int
    """Which of that anchor's selection; -1 for the anchor itself."""


_LOG_VALUE = itemgetter(0)


def find_unread(
    tree: DraftTree,
    anchors: Sequence[Anchor],
    shape: Shape,
    *,
    valuation: Valuation = as_the_draft_has_it,
) -> list[Unread]:
    """The nodes of the anchors' proposals that are not read, the likeliest first.

    Empty when all that is worth reading was read: a node at the last level is not, for nothing can follow it.
    """
    unread: list[Unread] = []
    children, is_read, is_chain = tree.children(), tree.is_read, shape.is_chain
    for number, anchor in enumerate(anchors):
        if not is_read[anchor.node]:
            unread.append(Unread(anchor.log_value, number, -1))
            continue
        last = min(anchor.depth, shape.depth)
        selection = anchor.selection
        if selection is None and is_chain:
            limit = min(last, shape.num_nodes)
            selection = _select_chain(tree, anchor.node, limit, valuation, children, anchor.chain)
        elif selection is None:
            selection = select(
                tree, anchor.node, shape, depth=anchor.depth, valuation=valuation, children=children
            )
        anchor.selection = selection
        # Only the end of a chain can be unread.
        for index in range(max(len(selection) - 1, 0) if is_chain else 0, len(selection)):
            _, _, _, log_value, depth, node = selection[index]
            if depth < last and (node is None or not is_read[node]):
                unread.append(Unread(anchor.log_value + log_value, number, index))
    unread.sort(key=_LOG_VALUE, reverse=True)  # ties stay in the order of the anchors and their entries
    return unread


def add_unread(
    tree: DraftTree, anchors: Sequence[Anchor], chosen: Sequence[Unread], *, room: int
) -> list[int]:
    """Add what the tree lacks of the chosen nodes, and return all of them, ascending.

    room: most nodes to add; more are left out.
    """
    nodes: list[int] = []
    changed: set[int] = set()
    for _, number, index in chosen:
        anchor = anchors[number]
        if index < 0:
            nodes.append(anchor.node)
            continue
        assert anchor.selection is not None, "an anchor that was read has a selection"
        entry = anchor.selection[index]
        changed.add(number)
        node = entry.node
        if node is None:
            if room <= 0:
                continue
            room -= 1
            # Only nodes that were read have children in a selection, so the parent is in the tree.
            parent = anchor.node if entry.parent < 0 else anchor.selection[entry.parent].node
            assert parent is not None, "a selected child has a parent in the tree"
            node = tree.add(entry.token_id, parent)
            anchor.selection[index] = Entry(*entry[:-1], node)
        nodes.append(node)
    for number in changed:
        anchor = anchors[number]
        anchor.chain, anchor.selection = anchor.selection or [], None
    return sorted(nodes)


def settle(tree: DraftTree, anchor: int, entries: Sequence[Entry]) -> list[int]:
    """Add what the selection lacks in the tree. Returns the tree index of every entry."""
    nodes: list[int] = []
    for entry in entries:
        parent = anchor if entry.parent < 0 else nodes[entry.parent]
        nodes.append(tree.add(entry.token_id, parent) if entry.node is None else entry.node)
    return nodes
