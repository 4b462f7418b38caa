"""Every message that crosses between stages: tagged, frozen, and typed by its receiver.

Words used here, once and for all:

committed tokens   prompt and output that can no longer change; the last one is the *root* of the
                   next round.
round              one target forward that commits tokens. Round 0 is the prefill, with an empty proposal.
proposal           a token tree under the root. `token_ids[i]` has parent `parents[i]`, an index
                   smaller than i, or -1 for the root. A chain of K is the linear case.
outcome            (accepted_node, bonus_token): the deepest accepted node (-1 = none) and the token that
                   the target puts after it.
branch             a predicted outcome with the continuation drafted for it.
hit                the outcome was in the speculation cache with at least one drafted token after it.

Between verifier, speculator and predictor, `request_id` names one *admission*: the verifier adds a number
to the user's id (`Sequence.draft_id`), so that mail about a cancelled request is never taken for mail about
its successor with the same id.

`round_id` and `committed_len` travel in every round message and are checked on arrival, so that a
late or repeated message fails loudly and never as wrong text. Times are `time.monotonic_ns()`, which
all processes of one host share. Tensors do not travel: see `pipeline.tensor_ref.TensorRef`.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from conf.limits import (
    MAX_ADDITIVE_PENALTY,
    MAX_CHOICES,
    MAX_GRAMMAR,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_IDS,
    MAX_STOP_STRING,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    MAX_WHOLE_NUMBER,
    MIN_REPETITION_PENALTY,
)
from pipeline.tensor_ref import TensorRef


class StageName(str, Enum):
    """The five stages, and the frontend (command line, `Engine`) that they answer to."""

    TOKENIZER = "tokenizer"
    SPECULATOR = "draft-speculator"
    PREDICTOR = "outcome-predictor"
    VERIFIER = "target-verifier"
    DETOKENIZER = "detokenizer"
    FRONTEND = "frontend"


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


_TokenId = Annotated[int, Meta(ge=0, le=MAX_WHOLE_NUMBER)]
_AdditivePenalty = Annotated[float, Meta(ge=-MAX_ADDITIVE_PENALTY, le=MAX_ADDITIVE_PENALTY)]


_GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of an answer must be, with vLLM's names. Exactly one of the first five is given."""

    json: _GrammarText | None = None
    """A JSON value of this schema, which is JSON text itself."""
    json_object: bool = False
    """Any JSON object."""
    regex: _GrammarText | None = None
    """All of it matches this, in the syntax of Rust's `regex` crate, without look-around."""
    choice: Annotated[list[_GrammarText], Meta(max_length=MAX_CHOICES)] = []
    """One of these texts."""
    grammar: _GrammarText | None = None
    """A text of this grammar, in the notation of Lark (rule `start`) or GBNF (rule `root`)."""
    disable_any_whitespace: bool = False
    """Of JSON: write it in one way, without free whitespace between its parts."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled; the options mean what they mean in vLLM.

    Every field is resolved: the frontend draws a seed where none was given. Several samples of one prompt are
    several requests (`pipeline.samples`).
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_WHOLE_NUMBER)]
    """Most tokens to generate, at least 1."""
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Meta(ge=0, le=MAX_WHOLE_NUMBER)] = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the smallest set of likeliest tokens whose mass reaches top_p; 1 keeps all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Drop tokens less likely than min_p times the likeliest; 0 drops none."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)]
    """0 <= seed < 2**63."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_WHOLE_NUMBER)] = 0
    """End-of-sequence and stop tokens are banned, and stop strings ignored, before so many output tokens."""
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_STRING)]],
        Meta(max_length=MAX_STOP_STRINGS),
    ] = []
    """Texts that end the answer; it is cut before the first one that it would hold."""
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=MAX_STOP_IDS)] = []
    """Tokens that end the answer, as end-of-sequence tokens do."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    presence_penalty: _AdditivePenalty = 0.0
    """Taken off the logits of tokens that the output holds."""
    frequency_penalty: _AdditivePenalty = 0.0
    """Taken off the logits of tokens once for each time that the output holds them."""
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    """Divides the positive logits of tokens that prompt or output hold, and multiplies the negative ones."""
    logit_bias: dict[_TokenId, Annotated[float, Meta(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] = {}
    """Added to the logits of these tokens."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the log-probability of each output token and of so many likeliest ones, by the model's own law:
    before bias, penalties, temperature and filters. None reports nothing."""
    echo: bool = False
    """Return the text of the prompt before the answer."""
    structured_outputs: StructuredOutputs | None = None
    """What the answer must be. Tokens that lead away from it are excluded before everything else."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model's own law, the log-softmax of its logits, says at one output token."""

    token_id: int
    logprob: float
    rank: int
    """How many tokens are at least as likely: 1 for the likeliest."""
    top_token_ids: list[int]
    """The likeliest tokens, best first, `Sampling.logprobs` of them."""
    top_logprobs: list[float]
    token: str = ""
    """The text of the token by itself, where that is U+FFFD for a part of a character, and a special token is
    spelled out. The detokenizer fills it in, as it does `top_tokens`."""
    top_tokens: list[str] = []


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence or stop token, which is in the token ids and not in the text; or a stop string, of
    which the same is true."""
    LENGTH = "length"
    """`max_tokens` or the context limit."""
    CANCELLED = "cancelled"


class ProposalSource(str, Enum):
    """Where a proposal came from."""

    DRAFT = "draft"
    """Drafted after the outcome was known, as linear speculation always does."""
    HIT = "hit"
    """Served from the speculation cache."""
    BACKUP = "backup"
    """The outcome was not in the cache; drafted by the backup."""


# --- to the tokenizer ---------------------------------------------------------------------------------


class SubmitRequest(Message, frozen=True, kw_only=True):
    """A new request. Exactly one of `prompt` (raw text), `chat` (turns for the template) and
    `prompt_token_ids` is given."""

    request_id: str
    prompt: str | None = None
    chat: list[ChatTurn] | None = None
    prompt_token_ids: list[int] | None = None
    """What the model reads, as it stands: no template, no special tokens added."""
    sampling: Sampling
    submitted_ns: int


class CancelRequest(Message, frozen=True, kw_only=True):
    """Drop a request. Sent to the tokenizer, which passes it on, so that it never overtakes its request.

    Unknown ids are ignored.
    """

    request_id: str


# --- to the verifier ----------------------------------------------------------------------------------


class TokenizedRequest(Message, frozen=True, kw_only=True):
    """A request whose prompt is token ids; from the tokenizer."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    submitted_ns: int
    prompt_text: str | None = None
    """What `Sampling.echo` returns: the prompt as the tokenizer read it, or what given ids decode to. None
    without it."""


class PlanFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `speculation.plan=auto` goes by, as measured so far. Times in ms."""

    verify_ms: float
    """A target forward of one row for each request, as fitted..."""
    verify_row_ms: float
    """...and of each row more."""
    step_ms: float
    """A draft step that reads one row..."""
    step_row_ms: float
    """...and each row more."""
    acceptance: float
    """How often the target goes on to a child of a node that it reached."""
    hit_rate: float
    """How often something was ready for an outcome, where outcomes were prepared."""
    tokens_per_second: float
    """Of all requests together: the price of time."""
    speculative_tokens_per_second: float
    """Of one request, in rounds with proposals since speculation was last tried; 0 before any."""
    plain_tokens_per_second: float
    """Of one request, decoded plainly: as last measured, else as the target's times say. Speculation rests
    where it is slower."""
    least_chance: float
    """Nodes less likely to be accepted are not verified."""
    num_branches: int
    """Outcomes that are prepared a round, at most; 0 where that costs more than it saves."""


class DraftLaws(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The laws that the tokens of a proposal were drawn from, for the rejection rule."""

    rows: list[int]
    """For each node the row of `weights` that it was drawn from, without replacement among the siblings of
    that row and in their order; -1 where no chance was involved (a point mass)."""
    weights: TensorRef
    """[laws, columns] float32 or float64: probabilities; rows beyond the last one named are undefined."""
    token_ids: TensorRef
    """[columns] int32: the target's id of each column."""


class Proposal(Message, frozen=True, kw_only=True):
    """What the target shall verify in round `round_id`; from the speculator. May be empty."""

    request_id: str
    round_id: int
    committed_len: int
    token_ids: list[int]
    parents: list[int]
    source: ProposalSource
    ready_length: int
    """Drafted tokens that were ready below this outcome, before any cut to what the request still needs."""
    plan: PlanFigures | None = None
    """What was planned by, in one proposal of a round; None as long as it is what was configured."""
    rest_rounds: Annotated[int, Meta(ge=0)] | None = None
    """Where speculation rests: rounds after this one that the target shall run without a proposal."""
    rest_batch: Annotated[int, Meta(ge=0)] = 0
    """Requests that rest together; when half of them or fewer are left, the rest is over."""
    draft_spans: list[tuple[int, int]]
    """When the draft computed for this request since its last proposal: (start, end) in ns, ascending."""
    laws: DraftLaws | None = None
    """None where every token is a point mass, and where the rule is another."""


class DraftCapacity(Message, frozen=True, kw_only=True):
    """What the draft's KV cache holds; from the speculator, before anything else.

    The verifier counts the draft's pages by it: one place decides who is admitted and who is pre-empted.
    """

    num_pages: int | None
    """None: the draft has no KV cache."""
    page_size: int
    num_nodes: int
    """Slots that a request may need behind its committed tokens."""
    max_position: int | None
    """Committed tokens from this position on take no slots; None: no such limit."""


# --- to the speculator (and some to the predictor) ----------------------------------------------------


class BeginDraft(Message, frozen=True, kw_only=True):
    """A request was admitted, or admitted again; draft for it. Sent when the target starts its prefill."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    """What is committed already of a request that was pre-empted; the last one is its root."""
    round_id: int = 0
    """The round that the target runs first: it reads all these tokens, and has an empty proposal."""
    sampling: Sampling
    max_len: int
    """Most committed tokens this request can reach: prompt and output."""
    eos_token_ids: list[int] = []
    """The target's, which `Sampling.min_tokens` bans."""


class Outcome(Message, frozen=True, kw_only=True):
    """What the target decided in round `round_id`; to speculator and predictor."""

    request_id: str
    round_id: int
    committed_len: int
    """Committed tokens after this round, the bonus included."""
    accepted_node: int
    bonus_token: int
    num_accepted: int
    """Depth of `accepted_node`: 0 when nothing was accepted."""
    num_proposed: int
    """Nodes of the verified proposal."""
    num_rows: int = 0
    """Tokens in the target's forward, all requests of the round together."""
    compute_ns: int = 0
    """From the start of that forward to the target's choices; 0 where it read parts of prompts, too."""
    decided_ns: int = 0
    """When the target had chosen."""
    num_following: Annotated[int, Meta(ge=0)] = 0
    """Outcomes of the same forward that follow this one: the draft answers all of them together."""
    ends_rest: bool = False
    """The target waits for a proposal again: speculation rested for a batch of which half or less is left."""


class EndDraft(Message, frozen=True, kw_only=True):
    """The request is over; forget it."""

    request_id: str


class Plan(Message, frozen=True, kw_only=True):
    """Which outcomes of round `round_id` to prepare, most probable first; from the predictor."""

    request_id: str
    round_id: int
    nodes: list[int]
    """Accepted node of each outcome, -1 for the root."""
    token_ids: list[int]
    """Bonus token of each outcome."""
    log_probs: list[float]
    """How likely each outcome is held to be, up to a constant of the plan."""
    next_fan_outs: list[int] = []
    """F of a node at each depth of the next proposal, for Saguaro sampling; empty where it is not used."""


# --- to the predictor ---------------------------------------------------------------------------------


class Candidates(Message, frozen=True, kw_only=True):
    """The draft's likeliest tokens after the root and after every node of the submitted proposal.

    Row 0 of the tensor is the root, row i + 1 is node i. Rows hold candidates best first, padded with -1.
    """

    request_id: str
    round_id: int
    token_ids: list[int]
    parents: list[int]
    num_branches: int
    """Outcomes that the draft has time to prepare: the plan names at most so many."""
    candidate_ids: TensorRef
    """[rows, width] int32."""
    candidate_log_probs: TensorRef
    """[rows, width] float32: as softmax(log q + g) has them; -inf where there is no candidate."""
    is_filler: bool = False
    """Whether the proposal answers a miss without the draft: what a look-up found, or nothing."""
    is_drawn: bool = False
    """Whether the proposal was drawn by chance, for the rejection rule; there is no g then."""


# --- to the detokenizer -------------------------------------------------------------------------------


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one finished request. Undefined ones are None, never NaN.

    acceptance *length* counts the bonus token, acceptance *rate* does not.
    """

    num_rounds: int
    """Target forwards that committed tokens, the prefill included."""
    num_proposed_tokens: int
    num_accepted_tokens: int
    """Proposed tokens that were emitted, after truncation."""
    acceptance_length: float | None
    """Output tokens per round; None for a request that was cancelled during its prefill."""
    acceptance_rate: float | None
    """Accepted over proposed nodes."""
    cache_hits: int | None
    cache_misses: int | None
    hit_rate: float | None
    num_cached_prompt_tokens: int = 0
    """Prompt tokens whose keys and values the target had from an earlier request."""
    num_preemptions: int = 0
    """How often the request gave its KV up for others, to be read again; such a reading counts as a round."""
    num_rest_rounds: int = 0
    """Rounds in which speculation rested (`plan=auto`): it did not pay, or plain decoding was measured."""
    plan: PlanFigures | None = None
    """What `plan=auto` went by in the end."""
    mean_ready_length: float | None
    """Mean drafted tokens that were ready on a hit."""
    ttft_ms: float
    """From submission to the first committed token; to the end of a request that was cancelled before."""
    decode_seconds: float | None
    """Wall time from the end of the prefill to the last commit, waits included."""
    tokens_per_second: float | None
    """Tokens committed after the prefill, per decode second."""
    target_compute_ms: float
    """Time in the target's forwards, choices and KV moves after the prefill."""
    target_wait_ms: float
    """Time the target stood idle for this request's next proposal."""
    draft_wait_ms: float
    """The part of `target_wait_ms` in which the draft was computing."""
    overlap_ms: float
    """Time in which the draft computed while the target verified."""
    overhead_ms: float
    """Decode wall time that is neither target compute nor waiting for a draft step."""


class BeginText(Message, frozen=True, kw_only=True):
    """What the text of a request needs beyond its tokens; from the verifier, before the first `Committed`.

    Only sent for requests with stop strings or echo.
    """

    request_id: str
    stop: list[str]
    """Text that may be the beginning of one of these is held back."""
    prompt_text: str | None
    """Comes before the answer."""


class Committed(Message, frozen=True, kw_only=True):
    """Tokens that can no longer change; from the verifier. The last one of a request carries its end."""

    request_id: str
    round_id: int
    token_ids: list[int]
    num_accepted: int
    """How many of `token_ids` came from the proposal."""
    source: ProposalSource | None
    """Where the proposal came from; None for the prefill, without speculation and while it rests."""
    num_prompt_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, where the request asks for them."""
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    """Given exactly when `finish_reason` is."""
    stop_reason: str | int | None = None
    """The stop string or the id out of `Sampling.stop_token_ids` that ended the request, if one did."""
    num_cut_characters: int = 0
    """Characters that a stop string takes off the end of the text, itself included."""
    failure: str | None = None
    """Why the request fails here, which then has neither tokens nor a finish reason."""
    prompt_token_ids: list[int] = []
    """With the end of a request: what the model read before the output."""


# --- to the frontend ----------------------------------------------------------------------------------


class TextBlock(Message, frozen=True, kw_only=True):
    """Text of one committed block, ready to show: one message per block, whatever its length."""

    request_id: str
    text: str
    """May be empty while a character, or what may be a stop string, is incomplete. An echoed prompt comes
    first, in a block without tokens."""
    token_ids: list[int]
    source: ProposalSource | None
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, where the request asks for them."""

    @property
    def num_tokens(self) -> int:
        """How many tokens the block has: they were committed at once."""
        return len(self.token_ids)

    @property
    def is_hit(self) -> bool:
        """Whether its proposal was prepared ahead."""
        return self.source is ProposalSource.HIT


class RequestFinished(Message, frozen=True, kw_only=True):
    """A request is complete; every `TextBlock` of it was sent before."""

    request_id: str
    finish_reason: FinishReason
    text: str
    """The whole text, equal to the sum of the blocks."""
    num_prompt_tokens: int
    num_output_tokens: int
    metrics: RequestMetrics
    stop_reason: str | int | None = None
    """The stop string or the id out of `Sampling.stop_token_ids` that ended the request, if one did."""
    num_echo_characters: int = 0
    """How much of `text` is the echoed prompt."""
    prompt_token_ids: list[int] = []
    """What the model read before the output, `num_prompt_tokens` of them."""


class RequestFailed(Message, frozen=True, kw_only=True):
    """A request could not be served; it failed alone."""

    request_id: str
    reason: str


TokenizerMessage = SubmitRequest | CancelRequest
VerifierMessage = TokenizedRequest | DraftCapacity | Proposal | CancelRequest
SpeculatorMessage = BeginDraft | Outcome | Plan | EndDraft
PredictorMessage = Candidates | Outcome | EndDraft
DetokenizerMessage = BeginText | Committed
FrontendMessage = TextBlock | RequestFinished | RequestFailed
