"""What `LLM` returns, shaped like vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import RequestError
from pipeline.messages import ChatTurn, RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """An end-of-sequence token is among them, and not in the text."""
    finish_reason: str
    """`stop` or `length`."""
    seed: int
    """With it, the same prompt gives the same answer again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and what came of it."""

    request_id: str
    prompt: str | list[ChatTurn]
    outputs: list[CompletionOutput]
    num_prompt_tokens: int
    metrics: RequestMetrics
    finished: bool = True


class PartialResults(RequestError):
    """Some prompts could not be answered. outputs: in the order of the prompts, None for those."""

    def __init__(self, reason: str, outputs: list[RequestOutput | None]) -> None:
        super().__init__(reason)
        self.outputs = outputs
