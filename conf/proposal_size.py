"""How large a proposal can be: the draft that makes it and the target that verifies it must agree."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import SpeculationConfig

_BEST_FIRST_ROWS = 8


def proposal_depth(speculation: SpeculationConfig) -> int:
    """Most levels below the root."""
    widths = speculation.tree.widths
    return speculation.depth if widths is None else len(widths)


def submitted_nodes(speculation: SpeculationConfig) -> int:
    """Most nodes that the target is asked to verify: the draft's, and what is looked up beside them."""
    return proposal_nodes(speculation) + speculation.draft.look_up


def proposal_nodes(speculation: SpeculationConfig) -> int:
    """Most nodes that are the draft's."""
    tree = speculation.tree
    if tree.widths is not None:
        return nodes_of_widths(tree.widths)
    return speculation.depth if tree.nodes is None else tree.nodes


def rows_of_a_step(speculation: SpeculationConfig) -> int | None:
    """Most nodes that the draft reads in one step; None: no limit."""
    tree = speculation.tree
    is_best_first = tree.widths is None and tree.nodes is not None
    return tree.rows or (_BEST_FIRST_ROWS if is_best_first else None)


def draft_nodes(speculation: SpeculationConfig) -> int:
    """Most nodes that the draft holds behind the committed tokens.

    The proposal, the branches with their proposals, a bonus token after a miss, what best first reads and
    then leaves out, and room to settle one more proposal.
    """
    budget = speculation.budget if speculation.prepare_outcomes else 0
    is_best_first = speculation.tree.widths is None and speculation.tree.nodes is not None
    left_out = (rows_of_a_step(speculation) or 0) * proposal_depth(speculation) if is_best_first else 0
    return 2 * submitted_nodes(speculation) + budget * (proposal_nodes(speculation) + 1) + 1 + left_out


def nodes_of_widths(widths: Sequence[int]) -> int:
    """Nodes of a tree whose nodes at depth d have widths[d] children."""
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
    return total


def parents_of_widths(widths: Sequence[int]) -> list[int]:
    """Parents of such a tree's nodes, level by level; -1 is the root."""
    parents: list[int] = []
    level = [-1]
    for width in widths:
        first = len(parents)
        parents += [parent for parent in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return parents
