"""What the bench and its workers tell one another: one JSON object a line.

bench  -> worker   EngineSpec or PeerSpec, once; then a Question at a time; end of file ends the worker
worker -> bench    Ready or Skipped, once; then an Answer for each Question; or Failed, and the end
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
    """One of our systems: a composed configuration, whose models are local folders."""

    config: RunConfig


class PeerSpec(_Line, frozen=True, kw_only=True):
    """One of the peers."""

    name: str
    """As in `tools.bench.entries.PEER_KEYS`."""
    folder: str
    """Of the target."""
    dtype: DType
    cores: list[int]
    """The only cores it may use; it gets a thread each."""
    max_context: int
    """Tokens of the longest prompt and its answer."""
    draft: str | None
    assistant_tokens: int | None
    lookup_tokens: int
    llama_format: LlamaFormat

    @property
    def threads(self) -> str:
        """In words."""
        return f"{len(self.cores)} thread{'s' if len(self.cores) > 1 else ''} on cores {self.cores}"


WorkerSpec = EngineSpec | PeerSpec


class Question(_Line, frozen=True, kw_only=True):
    """One prompt, as text for ours and as the ids of the same text for peers."""

    text: str
    is_chat: bool
    """Whether the model's chat template applies."""
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int


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


class Answer(_Line, frozen=True, kw_only=True):
    """One answer and its times."""

    token_ids: list[int]
    """The end-of-sequence token included."""
    num_prompt_tokens: int
    ttft_ms: float
    """From the question to the first tokens."""
    num_decoded: int
    """Tokens after those that came first."""
    decode_seconds: float | None
    """In which they came; None if there were none."""
    num_rounds: int | None
    """Target forwards that gave tokens, the prefill included; None where it is not known."""
    wall_seconds: float
    """From the question to the whole answer, as the worker saw it."""
    metrics: RequestMetrics | None = None
    """The engine's own figures; None for peers."""


ToWorker = WorkerSpec | Question
FromWorker = Ready | Skipped | Failed | Answer
