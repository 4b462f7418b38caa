"""Proposals that no draft stands behind: tokens looked up in the text so far, or random ones.

They cost nothing, so they serve where the target would wait for a draft (the backups `ngram` and `random`),
and beside a draft's own proposal in one tree (`speculation.draft.look_up`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.noise import stream_key
from stages.draft_speculator.draft_tree import DraftTree

_STREAM = 0x6A09E667F3BCC908
"""Keeps the choice of random tokens apart from the noise of the request."""


def random_tokens(text: Sequence[int], *, seed: int, position: int, count: int) -> list[int]:
    """`count` tokens of the text, for the positions from `position` on; a function of its arguments alone."""
    return [text[stream_key(seed ^ _STREAM, position + i) % len(text)] for i in range(count)] if text else []


def hang(tree: DraftTree, proposal: Sequence[int], token_ids: Sequence[int], *, most: int) -> list[int]:
    """Put a chain below the root beside what is proposed. Returns the nodes that are new to the proposal.

    proposal: its nodes, parents first. Where the chain agrees with it nothing is added, and where it leaves
    it, up to `most` nodes.
    """
    proposed = set(proposal)
    children = tree.children()
    added: list[int] = []
    node = tree.root
    for token in token_ids:
        child = children.get((node, token))
        if child is None or child not in proposed:
            if len(added) == most:
                break
            if child is None:
                child = tree.add(token, node)
            added.append(child)
        node = child
    return added
