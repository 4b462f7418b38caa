"""Token trees as index lists: who is whose ancestor, how deep, and which path the target accepts.

A tree hangs under a root. `parents[i]` is the parent of node i, an index smaller than i, or -1 for the
root. Plain Python on purpose: the lists are short, and every stage, with torch or without, uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node; children of the root have depth 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def check_tree(token_ids: Sequence[int], parents: Sequence[int], *, vocab_size: int) -> str | None:
    """What is wrong with a tree that another process sent, or None.

    Siblings must differ: the target's choice names at most one child.
    """
    if len(token_ids) != len(parents):
        return f"{len(token_ids)} tokens but {len(parents)} parents"
    seen: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if not -1 <= parent < node:
            return f"node {node} has parent {parent}; parents come before their children"
        if not 0 <= token < vocab_size:
            return f"node {node} has token {token}, outside the vocabulary of {vocab_size}"
        if (parent, token) in seen:
            return f"node {parent} has two children with token {token}"
        seen.add((parent, token))
    return None


def accept_path(
    choices: Sequence[int], token_ids: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """Walk down the tree as long as the target's choice is a child (accept iff equal).

    choices: the target's token after the root (index 0) and after each node i (index i + 1).
    Returns the accepted nodes from the top, and the bonus token: the choice after the last of them.
    """
    return walk_down(lambda path: choices[path[-1] + 1 if path else 0], token_ids, parents)


def walk_down(
    choose: Callable[[Sequence[int]], int], token_ids: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """`accept_path` where a choice is worked out only when it is asked for.

    choose: from the accepted nodes so far, from the top, to the target's token after the last of them, or
        after the root.
    """
    child_of = {
        (parent, token): node for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True))
    }
    accepted: list[int] = []
    while True:
        choice = choose(accepted)
        child = child_of.get((accepted[-1] if accepted else -1, choice))
        if child is None:
            return accepted, choice
        accepted.append(child)


def ancestor_rows(parents: Sequence[int]) -> list[list[bool]]:
    """Attention mask among the root and the nodes of its tree.

    Returns [1 + n][1 + n], row and column 0 the root, row i + 1 node i; True where the column is an
    ancestor of the row, or itself.
    """
    size = len(parents) + 1
    rows = [[True] + [False] * (size - 1)]
    for node, parent in enumerate(parents):
        row = list(rows[parent + 1])
        row[node + 1] = True
        rows.append(row)
    return rows
