"""The detokenizer stage: committed token ids become text, block by block.

It owns the text that is not settled yet: the bytes of an incomplete character stay back until the
character is complete, so that a reader never sees U+FFFD for half an emoji, and so does what may be the
beginning of a stop string. The blocks of a request add up to the text that decoding all of its ids at once
would give, whatever the blocks were, cut before the stop string if one ended it (the verifier says so).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from conf.schema import RunConfig
from pipeline.errors import ConfigError, ProtocolError
from pipeline.messages import (
    BeginText,
    Committed,
    DetokenizerMessage,
    FinishReason,
    RequestFailed,
    RequestFinished,
    RequestMetrics,
    StageName,
    TextBlock,
    TokenLogprobs,
)
from pipeline.stage import Outbox, Stage, StageContext
from stages.incremental_text import IncrementalText, TextDecoder
from stages.vocabulary import load_tokenizer


@dataclass(slots=True, kw_only=True)
class _OpenRequest:
    """What is kept of a request between its blocks."""

    decoding: IncrementalText
    stop: list[str] = field(default_factory=list)
    held: str = ""
    """Settled text that may be the beginning of a stop string."""
    num_echo_characters: int = 0
    last_round: int = -1
    pieces: list[str] = field(default_factory=list)
    num_output_tokens: int = 0


class DetokenizerStage(Stage):
    """Turns each `Committed` into a `TextBlock`, and the last of a request into `RequestFinished` too, or
    into `RequestFailed` alone."""

    accepts = DetokenizerMessage

    def __init__(self, *, outbox: Outbox, folder: Path) -> None:
        """folder: local folder of the target model."""
        self._outbox = outbox
        self._folder = folder
        self._decoder: TextDecoder | None = None
        self._open_requests: dict[str, _OpenRequest] = {}

    def setup(self) -> None:
        self._decoder = TextDecoder(load_tokenizer(self._folder))

    def handle(self, message: DetokenizerMessage) -> None:
        match message:
            case BeginText():
                self._begin(message)
            case Committed():
                self._take_block(message)

    def _begin(self, message: BeginText) -> None:
        assert self._decoder is not None, "setup comes before the first message"
        if message.request_id in self._open_requests:
            raise ProtocolError(f"request {message.request_id!r}: its text has begun already")
        request = _OpenRequest(decoding=IncrementalText(self._decoder), stop=message.stop)
        self._open_requests[message.request_id] = request
        if message.prompt_text:
            request.pieces.append(message.prompt_text)
            request.num_echo_characters = len(message.prompt_text)
            echo = TextBlock(
                request_id=message.request_id, text=message.prompt_text, token_ids=[], source=None
            )
            self._outbox.send(StageName.FRONTEND, echo)

    def _take_block(self, message: Committed) -> None:
        if message.failure is not None:
            self._open_requests.pop(message.request_id, None)
            failed = RequestFailed(request_id=message.request_id, reason=message.failure)
            self._outbox.send(StageName.FRONTEND, failed)
            return
        request = self._open_request(message)
        text = self._decode(request, message)
        request.pieces.append(text)
        request.num_output_tokens += len(message.token_ids)
        if message.token_ids or text:
            block = TextBlock(
                request_id=message.request_id,
                text=text,
                token_ids=message.token_ids,
                source=message.source,
                logprobs=message.logprobs and [self._with_texts(entry) for entry in message.logprobs],
            )
            self._outbox.send(StageName.FRONTEND, block)
        if message.finish_reason is not None and message.metrics is not None:
            self._finish(request, message, message.finish_reason, message.metrics)

    def close(self) -> None:
        self._open_requests.clear()
        self._decoder = None

    def _open_request(self, message: Committed) -> _OpenRequest:
        assert self._decoder is not None, "setup comes before the first message"
        if (message.finish_reason is None) != (message.metrics is None):
            raise ProtocolError(f"request {message.request_id!r}: finish reason and metrics come together")
        request = self._open_requests.get(message.request_id)
        if request is None:
            request = _OpenRequest(decoding=IncrementalText(self._decoder))
            self._open_requests[message.request_id] = request
        # The end of a cancelled request commits nothing and may repeat the last round.
        if message.round_id <= request.last_round and message.token_ids:
            raise ProtocolError(
                f"request {message.request_id!r}: expected a round after {request.last_round}, "
                f"got round {message.round_id}"
            )
        request.last_round = message.round_id
        return request

    def _with_texts(self, entry: TokenLogprobs) -> TokenLogprobs:
        assert self._decoder is not None, "setup comes before the first message"
        return msgspec.structs.replace(
            entry,
            token=self._decoder.text_alone(entry.token_id),
            top_tokens=[self._decoder.text_alone(token_id) for token_id in entry.top_token_ids],
        )

    @staticmethod
    def _decode(request: _OpenRequest, message: Committed) -> str:
        token_ids = message.token_ids
        if message.finish_reason is FinishReason.STOP and not message.num_cut_characters:
            # Models exist whose end-of-sequence token is an ordinary one; it is no text either way.
            token_ids = token_ids[:-1]
        text = request.held + request.decoding.push(token_ids)
        if message.finish_reason is not None:
            text += request.decoding.finish()
            return text[: len(text) - message.num_cut_characters]
        num_held = _num_held(text, request.stop)
        request.held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _finish(
        self, request: _OpenRequest, message: Committed, reason: FinishReason, metrics: RequestMetrics
    ) -> None:
        del self._open_requests[message.request_id]
        finished = RequestFinished(
            request_id=message.request_id,
            finish_reason=reason,
            text="".join(request.pieces),
            num_prompt_tokens=message.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            metrics=metrics,
            stop_reason=message.stop_reason,
            num_echo_characters=request.num_echo_characters,
            prompt_token_ids=message.prompt_token_ids,
        )
        self._outbox.send(StageName.FRONTEND, finished)


def _num_held(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string without being all of it."""
    lengths = (
        size for s in stop for size in range(1, min(len(s) - 1, len(text)) + 1) if text.endswith(s[:size])
    )
    return max(lengths, default=0)


def build(context: StageContext) -> DetokenizerStage:
    """Make the stage from the run's settings; `model.path` is a local folder by now."""
    config = msgspec.msgpack.decode(context.settings, type=RunConfig)
    if config.model.path is None:
        raise ConfigError("model.path: expected the local folder of the resolved model, got none")
    return DetokenizerStage(outbox=context.outbox, folder=Path(config.model.path))
