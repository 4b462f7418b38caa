"""One admitted request as the verifier sees it: its committed tokens, its KV, and where its round stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pipeline.messages import Proposal, ProposalSource
from stages.model.pages import KVHandle
from stages.model.token_law import TokenLaw
from stages.target_verifier.round_clock import RoundClock
from stages.target_verifier.stopping import StopRules


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Mutable state of one request; only the verifier touches it.

    Invariant between rounds: the KV cache holds every committed token but the last, the root. While the
    prompt is read it holds the first `num_prefilled` of them.
    """

    request_id: str
    draft_id: str
    """What speculator and predictor call it: unique among all admissions of this verifier."""
    token_ids: list[int]
    """Committed tokens: prompt, then output."""
    num_prompt_tokens: int
    max_len: int
    """Most committed tokens this request can reach."""
    kv: KVHandle
    law: TokenLaw
    stop_rules: StopRules
    clock: RoundClock
    num_top_logprobs: int | None = None
    """`Sampling.logprobs`."""
    round_id: int = 0
    """The round that comes next; round 0 is the prefill."""
    num_prefilled: int = 0
    """Tokens of the prompt that were read."""
    proposal: Proposal | None = field(default=None)
    """The proposal of round `round_id`, once it is here."""
    draft_laws: Tensor | None = None
    """What its tokens were drawn from, [laws, V]; under the rejection rule."""
    acceptance_seed: int | None = None
    """Of the noise that accepts or rejects; None where the coupled rule judges."""

    rest_rounds: int = 0
    """Rounds after this one that wait for no proposal."""
    is_resting: bool = False
    """Whether round `round_id` is such a one."""

    @property
    def is_prefilling(self) -> bool:
        """Whether the prompt is not read to its end."""
        return self.round_id == 0

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
        """Where the proposal came from; None without one."""
        return None if self.proposal is None else self.proposal.source
