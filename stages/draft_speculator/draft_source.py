"""What guesses tokens: the interface that a draft model, a look-up and the tests' scripted drafts share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from conf.schema import SpeculationConfig, Verification
from pipeline.messages import BeginDraft
from stages.draft_speculator.draft_tree import DraftTree, Rerooting


class Drawing(Enum):
    """How the tokens that may follow become children, above temperature 0."""

    COUPLED = "the likeliest under the noise that the target uses"
    DRAWN = "drawn without replacement, with noise of the draft's own"
    LIKELIEST = "the likeliest: a law of no chance"

    @classmethod
    def of(cls, speculation: SpeculationConfig) -> Drawing:
        """What the rule of acceptance allows.

        Best first chooses nodes by the values that were drawn, so what it chooses from must not be drawn.
        """
        if speculation.verification is Verification.coupled:
            return cls.COUPLED
        return cls.DRAWN if speculation.tree.nodes is None else cls.LIKELIEST


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendJob:
    """One request's share of a draft step: read `nodes`, and say what follows each from the root on."""

    request_id: str
    tree: DraftTree
    nodes: list[int]
    """Unread nodes, ascending. Every ancestor is read already, or in the list too."""
    fan_outs: Sequence[int] = ()
    """F of each node, for Saguaro sampling; empty without it."""


class DraftSource(ABC):
    """A draft. Requests are known by id between `begin` and `end`."""

    max_position: int | None = None
    """First position it cannot read; None where there is no limit."""
    num_pages: int | None = None
    """Of its KV cache; None where it has none."""
    page_size: int = 1
    """Slots in one of them."""
    law_token_ids: Sequence[int] | None = None
    """Ids of the columns of the laws that it draws from; None where it draws nothing."""

    @abstractmethod
    def begin(self, request: BeginDraft, *, max_nodes: int) -> int:
        """Make room for a request whose tree holds up to `max_nodes` nodes behind its committed tokens.

        Returns how many of its tokens need not be read, because an earlier request began with them.
        Raises `RequestError` where there is none.
        """

    @abstractmethod
    def extend(self, jobs: Sequence[ExtendJob]) -> None:
        """One draft step for all jobs: read the nodes, set `is_read`, and `next_tokens` from the root on."""

    @abstractmethod
    def reroot(self, request_id: str, rerooting: Rerooting, tree: DraftTree) -> None:
        """The tree was rerooted: move state along, before the tree drops its read prefix."""

    @abstractmethod
    def end(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what outlives requests."""
