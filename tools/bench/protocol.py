"""What the bench and its workers tell one another: one JSON object a line.

bench  -> worker   EngineSpec or PeerSpec, once; then a Batch at a time; end of file ends the worker
worker -> bench    Ready or Skipped, once; then Answers for each Batch; or Failed, and the end
"""

from __future__ import annotations

import msgspec

from conf.schema import DType, RunConfig
from pipeline.messages import RequestMetrics
from tools.bench.settings import LlamaFormat


class NotHere(Exception):
    """A worker's system cannot run here: a library is missing, or a format cannot hold the model."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all lines; the tag is the class name."""


class EngineSpec(_Line, frozen=True, kw_only=True):
    """One of our systems: a composed configuration, whose models are local folders. Its `max_requests` is the
    size of the largest batch."""

    config: RunConfig


class PeerSpec(_Line, frozen=True, kw_only=True):
    """One of the peers."""

    name: str
    """As in `tools.bench.entries.PEERS`."""
    folder: str
    """Of the target."""
    dtype: DType
    cores: list[int]
    """The only cores it may use; it gets a thread each."""
    max_context: int
    """Tokens of the longest prompt and its answer."""
    batch_size: int
    """Questions of the largest batch."""
    draft: str | None
    assistant_tokens: int | None
    lookup_tokens: int
    llama_format: LlamaFormat

    @property
    def threads(self) -> str:
        """In words."""
        return f"{len(self.cores)} thread{'s' if len(self.cores) > 1 else ''} on cores {self.cores}"


WorkerSpec = EngineSpec | PeerSpec


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt, as text for ours and as the ids of the same text for peers."""

    text: str
    is_chat: bool
    """Whether the model's chat template applies."""
    prompt_token_ids: list[int]
    max_tokens: int
    seed: int


class Batch(_Line, frozen=True, kw_only=True):
    """Questions that are asked at once."""

    questions: list[Question]
    temperature: float


class Ready(_Line, frozen=True, kw_only=True):
    """The system is loaded."""

    given: str
    """What it runs with, in words: version, number format, threads."""


class Skipped(_Line, frozen=True, kw_only=True):
    """The system cannot run here, which is nobody's mistake."""

    reason: str


class Failed(_Line, frozen=True, kw_only=True):
    """The system broke."""

    reason: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer, and when its tokens reached whoever asked."""

    token_ids: list[int]
    """The end-of-sequence token included."""
    num_prompt_tokens: int
    block_times_s: list[float]
    """When each block of tokens arrived, in seconds since its batch was asked; at least one, ascending."""
    block_tokens: list[int]
    """Tokens in each block: what one round gave arrives at once."""
    num_rounds: int | None
    """Target forwards that gave tokens, the prefill included; None where it is not known."""
    metrics: RequestMetrics | None = None
    """The engine's own figures; None for peers."""

    @property
    def ttft_ms(self) -> float:
        """From the question to the first block."""
        return 1000 * self.block_times_s[0]

    @property
    def num_decoded(self) -> int:
        """Tokens after the first block."""
        return len(self.token_ids) - self.block_tokens[0]


class Answers(_Line, frozen=True, kw_only=True):
    """The answers to a batch, in the order of its questions."""

    answers: list[Answer]


ToWorker = WorkerSpec | Batch
FromWorker = Ready | Skipped | Failed | Answers
