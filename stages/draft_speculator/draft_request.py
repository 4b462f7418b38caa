"""One request as the speculator sees it: its tree, its round, and what it does next."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from pipeline.messages import ProposalSource
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.growth import Anchor
from stages.draft_speculator.measures import Way
from stages.draft_speculator.ngram_draft import NgramIndex


class Phase(Enum):
    """What a request is doing. Only ANSWERING and DRAFTING keep the target waiting."""

    READING = "reads the prompt, or what it missed while speculation rested, in chunks"
    ANSWERING = "waits for the outcomes of the requests that share its rounds"
    DRAFTING = "drafts the proposal that the target waits for"
    GLUING = "reads what it proposed, to know what may follow"
    PLANNING = "waits for the predictor's plan"
    BRANCHING = "drafts continuations of likely outcomes"
    IDLE = "waits for the outcome"


class Submitted(NamedTuple):
    """Why a node is in the proposal."""

    log_prob: float | None
    """Of the token, as the draft has it; None for one that was looked up."""
    matched: int = 0
    """See `LookedUp.matched`; 0 for a random one."""


@dataclass(slots=True, kw_only=True)
class DraftRequest:
    """Mutable state of one request; only the speculator touches it."""

    request_id: str
    seed: int
    """Of the request's sampling."""
    tree: DraftTree
    max_len: int
    can_draft: bool
    """False where the draft has no room for this request: it is answered with empty proposals."""
    phase: Phase
    round_id: int = 0
    """The round whose proposal is with the target, or is being drafted."""
    pending: list[int] = field(default_factory=list)
    """Tree indices of what its phase reads next."""
    steps_left: int = 0
    """Reading steps that the proposal may still take, while the target waits."""
    source: ProposalSource = ProposalSource.DRAFT
    ready_length: int = 0
    """Drafted tokens that were ready when the outcome came."""
    growing: Anchor | None = None
    """The root, while the proposal that the target waits for is drafted."""
    branches: list[Anchor] = field(default_factory=list)
    """The predicted outcomes that are being continued."""
    text: NgramIndex | None = None
    """Its committed tokens, where some are looked up."""
    submitted: list[Submitted] = field(default_factory=list)
    """Of the nodes of the proposal that is with the target."""
    promised: float = 0.0
    """Tokens of that proposal that are expected to be accepted."""
    rest_left: int = 0
    """Rounds that the target goes on to run without a proposal."""
    rest_batch: int = 0
    """Requests that shared the first of them."""
    way: Way | None = None
    """Of the round that the target runs: PLAIN while speculation rests; None where it is of no single way."""
    is_prepared: bool = False
    """Whether the outcomes of that round were to be prepared."""
    due_ns: float = 0.0
    """When the outcome is expected."""
    submitted_ns: int = 0
    """When the proposal was sent."""
    is_behind: bool = False
    """Whether the round has no proposal because the draft has not read the committed tokens yet."""
    is_drawn: bool = False
    """Whether tokens of the submitted proposal were drawn by chance."""
    fan_outs: list[int] = field(default_factory=list)
    """F at each depth of a proposal, as the predictor last announced it, for Saguaro sampling."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """When the draft computed for this request since its last proposal, in ns."""

    @property
    def is_new(self) -> bool:
        """Whether the target still reads its prompt: it has not come to a first outcome."""
        return self.submitted_ns == 0

    @property
    def is_resting(self) -> bool:
        """Whether the round that the target runs has no proposal because speculation rests."""
        return self.way is Way.PLAIN

    def next_round(self) -> None:
        """The outcome is known: what was planned for the round before is over."""
        self.round_id += 1
        self.growing = None
        self.branches = []
        self.pending = []
        self.submitted = []
        self.promised = 0.0

    def choose_way(self, *, is_prepared: bool) -> None:
        """Of the coming round; one that follows a round for which it was otherwise is of neither."""
        way = Way.PREPARED if is_prepared else Way.DRAFTED
        self.way = way if is_prepared is self.is_prepared else None
        self.is_prepared = is_prepared

    def grow_proposal(self, depth: int) -> Anchor:
        """What the proposal of the round grows below, with what was worked out in the steps before."""
        if self.growing is None:
            self.growing = Anchor(self.tree.root, depth)
        # The first step reads committed tokens, too, and then forgets them.
        self.growing.node = self.tree.root
        return self.growing

    def useful_depth(self, committed_len: int, *, depth: int, max_position: int | None) -> int:
        """Tokens worth proposing behind `committed_len` committed ones.

        The target adds a bonus token to whatever it accepts, so the last token a request may get is never
        worth a proposal. Token d behind the root is drafted by reading position committed_len - 2 + d.
        """
        useful = min(depth, self.max_len - committed_len - 1)
        if max_position is not None:
            useful = min(useful, max_position - committed_len + 1)
        return max(useful, 0) if self.can_draft else 0
