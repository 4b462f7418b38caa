"""The draft's view of one request, as one token tree.

Under the last committed token, the root, hang the submitted proposal and, below its nodes, the branches:
predicted bonus tokens with the continuations drafted for them. An outcome names the branch that becomes
true; its subtree then *is* the next proposal. Committed tokens that the draft has not read yet come
before the root as a chain, so that prompt, catch-up, drafting and branch drafting are one operation:
`DraftSource.extend` reads some nodes and says what may follow each of them.

KV slot of node i: `prefix_len + i`, right behind the committed tokens that are read. Knows nothing about
models, messages or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class NextTokens(Protocol):
    """What may follow a node, as the draft sees it."""

    def ranked(self, count: int) -> list[tuple[int, float]]:
        """Up to `count` tokens, best first, each with its log-probability as softmax(log q + g) has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerooting:
    """What an outcome did to a tree: which KV moves where."""

    moved_from: list[int]
    """KV slots, absolute."""
    moved_to: list[int]


class DraftTree:
    """Nodes in parallel lists; a parent comes before its children. Nodes 0..root are committed tokens."""

    def __init__(self, prompt: Sequence[int], *, num_read: int = 0) -> None:
        """prompt: the committed tokens, at least one. num_read: of them, from the first; never the last."""
        assert num_read < len(prompt), f"{num_read} of {len(prompt)} tokens are read, expected fewer"
        self.prefix_len = num_read
        """Committed tokens that are read and dropped from the lists."""
        prompt = prompt[num_read:]
        self.token_ids: list[int] = list(prompt)
        self.parents: list[int] = list(range(-1, len(prompt) - 1))
        self.positions: list[int] = list(range(num_read, num_read + len(prompt)))
        """Absolute, of each node's token."""
        self.next_tokens: list[NextTokens | None] = [None] * len(prompt)
        """Known for nodes that are read, and were asked for."""
        self.is_read: list[bool] = [False] * len(prompt)
        self.root = len(prompt) - 1
        self.proposal: list[int] = []
        """Tree indices of the submitted proposal's nodes, in the order of the message."""
        self._children: dict[tuple[int, int], int] | None = None
        """What `children` returns, until indices shift."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def committed_len(self) -> int:
        """Committed tokens, the root included."""
        return self.prefix_len + self.root + 1

    def add(self, token_id: int, parent: int) -> int:
        """Append an unread node under `parent`; returns its index."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.positions.append(self.positions[parent] + 1)
        self.next_tokens.append(None)
        self.is_read.append(False)
        node = len(self.token_ids) - 1
        if self._children is not None:
            self._children[parent, token_id] = node
        return node

    def depth(self, node: int) -> int:
        """Steps from the root; 0 for the root, and for what comes before it."""
        return max(self.positions[node] - self.positions[self.root], 0)

    def ancestors(self, node: int) -> list[int]:
        """The nodes below the root that lead to `node`, itself included, from the bottom up."""
        path: list[int] = []
        while node > self.root:
            path.append(node)
            node = self.parents[node]
        return path

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to `node`; empty for the root."""
        return [self.token_ids[ancestor] for ancestor in reversed(self.ancestors(node))]

    @property
    def num_read_committed(self) -> int:
        """Committed tokens that are read: those before the first unread one."""
        num_read = 0
        while num_read <= self.root and self.is_read[num_read]:
            num_read += 1
        return self.prefix_len + num_read

    def unread_committed(self) -> list[int]:
        """Committed tokens that the draft must read before anything below them."""
        return [node for node in range(self.root + 1) if not self.is_read[node]]

    def drop_read_prefix(self) -> None:
        """Forget committed tokens before the root that are read: they are the dense prefix now."""
        count = 0
        while count < self.root and self.is_read[count]:
            count += 1
        if count == 0:
            return
        self.prefix_len += count
        self.root -= count
        del self.token_ids[:count], self.positions[:count], self.next_tokens[:count], self.is_read[:count]
        self.parents = [max(parent - count, -1) for parent in self.parents[count:]]
        self.proposal = [node - count for node in self.proposal]
        self._children = None

    def submit(self, proposal: list[int]) -> None:
        """These nodes, a tree under the root in parent-first order, go to the target."""
        self.proposal = proposal

    def children(self) -> dict[tuple[int, int], int]:
        """Every node below the root by (parent, token). Not to be changed."""
        if self._children is None:
            self._children = {
                (self.parents[node], self.token_ids[node]): node for node in range(self.root + 1, len(self))
            }
        return self._children

    def proposal_parents(self) -> list[int]:
        """Parents of the submitted nodes as the message names them."""
        index_of = {node: index for index, node in enumerate(self.proposal)}
        return [index_of.get(self.parents[node], -1) for node in self.proposal]

    def proposal_node(self, index: int) -> int:
        """Tree index of a node named as in messages; -1 is the root."""
        return self.root if index < 0 else self.proposal[index]

    def add_branch(self, accepted_index: int, bonus_token: int) -> int | None:
        """The node of an outcome, added if it is not there. None if its bonus token is a proposed child.

        A proposed child cannot be the bonus there: the target would have accepted it.
        """
        node = self.proposal_node(accepted_index)
        child = self.children().get((node, bonus_token))
        if child is None:
            return self.add(bonus_token, node)
        return None if child in self.proposal else child

    def subtree(self, node: int) -> list[int]:
        """All nodes below `node`, parents first."""
        inside = {node}
        below: list[int] = []
        for child in range(node + 1, len(self)):
            if self.parents[child] in inside:
                inside.add(child)
                below.append(child)
        return below

    def reroot(self, accepted_index: int, bonus_token: int) -> Rerooting:
        """Commit the path to the accepted node and the bonus token; keep only what the outcome left true.

        The bonus token becomes the root. If it was a branch, its subtree stays, else it is a new unread
        node. The caller moves the KV as the result says.
        """
        accepted = self.proposal_node(accepted_index)
        # A branch, or a node that was read on the way to the proposal and then left out of it.
        bonus = self.children().get((accepted, bonus_token))
        if bonus is None:
            bonus = self.add(bonus_token, accepted)
        committed = [*range(self.root + 1), *reversed(self.ancestors(bonus))]
        kept = [*committed, *self.subtree(bonus)]
        new_index = {old: new for new, old in enumerate(kept)}
        moves = [(old, new) for new, old in enumerate(kept) if old != new and self.is_read[old]]
        self.token_ids = [self.token_ids[old] for old in kept]
        self.positions = [self.positions[old] for old in kept]
        self.next_tokens = [self.next_tokens[old] for old in kept]
        self.is_read = [self.is_read[old] for old in kept]
        self.parents = [new_index.get(self.parents[old], -1) for old in kept]
        self.root = len(committed) - 1
        self.proposal = []
        self._children = None
        return Rerooting(
            moved_from=[self.prefix_len + old for old, _ in moves],
            moved_to=[self.prefix_len + new for _, new in moves],
        )
