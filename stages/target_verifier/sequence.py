"""One admitted request as the verifier sees it: its committed tokens, its KV, and where its round stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pipeline.messages import Proposal, ProposalSource, Sampling
from stages.model.pages import KVHandle
from stages.model.token_law import TokenLaw
from stages.target_verifier.round_clock import RoundClock
from stages.target_verifier.stopping import StopRules


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Mutable state of one request; only the verifier touches it.

    Invariant between rounds: the KV cache holds every committed token but the last, the root. While tokens
    are read it holds the first `num_prefilled` of them. A request that was pre-empted holds nothing there,
    and its `kv` is of no use.
    """

    request_id: str
    draft_id: str = ""
    """What speculator and predictor call it: unique among all admissions of this verifier."""
    arrival: int = 0
    """Ascending in the order of first admission; the youngest is pre-empted first."""
    sampling: Sampling
    token_ids: list[int]
    """Committed tokens: prompt, then output."""
    num_prompt_tokens: int
    max_len: int
    """Most committed tokens this request can reach."""
    kv: KVHandle
    prefill_len: int = 0
    """Committed tokens when it was admitted last: the target reads them before the first round."""
    num_prefilled: int = 0
    """Of these, those whose keys and values are there."""
    law: TokenLaw
    stop_rules: StopRules
    clock: RoundClock
    num_top_logprobs: int | None = None
    """`Sampling.logprobs`."""
    round_id: int = 0
    """The round that comes next; round 0 is the prefill."""
    proposal: Proposal | None = field(default=None)
    """The proposal of round `round_id`, once it is here."""
    draft_laws: Tensor | None = None
    """What its tokens were drawn from, [laws, V]; under the rejection rule."""
    acceptance_seed: int | None = None
    """Of the noise that accepts or rejects; None where the coupled rule judges."""

    rest_rounds: int = 0
    """Rounds after this one that wait for no proposal."""
    rest_batch: int = 0
    """See `Proposal`."""
    is_resting: bool = False
    """Whether speculation rests in round `round_id`."""

    @property
    def is_prefilling(self) -> bool:
        """Whether its tokens, as they were when it was admitted last, are not read to their end."""
        return self.num_prefilled < self.prefill_len

    @property
    def num_computed(self) -> int:
        """Committed tokens, from the first, whose keys and values are in the cache."""
        return self.num_prefilled if self.is_prefilling else len(self.token_ids) - 1

    @property
    def waits_for_proposal(self) -> bool:
        """Whether the next round must not start yet."""
        return self.proposal is None and not self.is_resting

    def next_round(self) -> None:
        """The round is committed."""
        self.round_id += 1
        self.proposal = None
        self.is_resting = self.rest_rounds > 0
        self.rest_rounds = max(self.rest_rounds - 1, 0)

    def ends_rest(self, *, num_left: int) -> bool:
        """Whether it rests in a batch half as large as the rest was begun for, or twice as large. It does no
        longer: that was found out for another batch."""
        if self.rest_rounds == 0 or self.rest_batch < 2 * num_left < 4 * self.rest_batch:
            return False
        self.rest_rounds = 0
        return True

    def begin(self, draft_id: str, kv: KVHandle) -> None:
        """It was admitted, for the first time or again: it holds KV, of its first `kv.num_cached` tokens."""
        self.draft_id, self.kv = draft_id, kv
        self.prefill_len, self.num_prefilled = len(self.token_ids), kv.num_cached

    def preempt(self) -> None:
        """It holds no KV any more: a proposal for its next round is void, and the draft forgets it."""
        self.proposal = self.draft_laws = None
        self.rest_rounds, self.is_resting = 0, False
        self.clock.num_preemptions += 1

    @property
    def room(self) -> int:
        """Tokens this request may still get."""
        return self.max_len - len(self.token_ids)

    def tree(self) -> tuple[list[int], list[int]]:
        """Tokens and parents to verify; empty without a proposal."""
        if self.proposal is None:
            return [], []
        return self.proposal.token_ids, self.proposal.parents

    def source(self) -> ProposalSource | None:
        """Where the proposal came from; None without one, and while speculation rests."""
        return None if self.proposal is None or self.is_resting else self.proposal.source
