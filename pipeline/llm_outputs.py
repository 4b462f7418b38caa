"""What `LLM` returns, shaped like vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import RequestError
from pipeline.messages import ChatTurn, RequestMetrics, TextBlock, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """What the model's own law, before all options, says of a token."""

    logprob: float
    rank: int
    """1 for the likeliest."""
    decoded_token: str
    """Its text by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """Which of the `n` answers to its prompt it is, from 0."""
    text: str
    blocks: list[TextBlock]
    """What came of each round: text, tokens, and whether they were a hit."""
    finish_reason: str
    """`stop` or `length`."""
    stop_reason: str | int | None
    """The stop string or token id of the request that ended it, if one did."""
    seed: int
    """With it, the same prompt gives the same answer again."""
    metrics: RequestMetrics

    @property
    def token_ids(self) -> list[int]:
        """All output tokens. An end-of-sequence token is among them, and not in the text."""
        return [token_id for block in self.blocks for token_id in block.token_ids]

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each token itself and the likeliest ones, by id; None for a request that asks for none."""
        if all(block.logprobs is None for block in self.blocks):
            return None
        return [_by_id(entry) for block in self.blocks for entry in block.logprobs or []]

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all tokens together; None for a request that asks for no `logprobs`."""
        if all(block.logprobs is None for block in self.blocks):
            return None
        return sum(entry.logprob for block in self.blocks for entry in block.logprobs or [])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and what came of it."""

    request_id: str
    prompt: str | list[ChatTurn] | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    """What the model read: the ids that were given, or those of the text with special tokens and template."""
    outputs: list[CompletionOutput]
    num_prompt_tokens: int
    finished: bool = True

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first answer had from an earlier request."""
        return self.metrics.num_cached_prompt_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """Those of the first answer."""
        return self.outputs[0].metrics


def _by_id(entry: TokenLogprobs) -> dict[int, Logprob]:
    """The token itself first, then the likeliest ones, best first."""
    chosen = Logprob(logprob=entry.logprob, rank=entry.rank, decoded_token=entry.token)
    top = zip(entry.top_token_ids, entry.top_logprobs, entry.top_tokens, strict=True)
    others = {
        token_id: Logprob(logprob=logprob, rank=rank, decoded_token=text)
        for rank, (token_id, logprob, text) in enumerate(top, start=1)
        if token_id != entry.token_id
    }
    return {entry.token_id: chosen, **others}


class PartialResults(RequestError):
    """Some prompts could not be answered. outputs: in the order of the prompts, None for those."""

    def __init__(self, reason: str, outputs: list[RequestOutput | None]) -> None:
        super().__init__(reason)
        self.outputs = outputs
