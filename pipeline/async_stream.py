"""One request of an `AsyncClient`, block by block, and its answer in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from pipeline.client_messages import Accepted, Cancel, Generate
from pipeline.connection import Connection
from pipeline.errors import EngineDead, RequestError, RequestTimeout, shown
from pipeline.messages import (
    FinishReason,
    RequestFailed,
    RequestFinished,
    RequestMetrics,
    TextBlock,
    TokenLogprobs,
)

if TYPE_CHECKING:  # which makes the streams
    from pipeline.async_client import AsyncClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished request."""

    request_id: str
    text: str
    blocks: list[TextBlock]
    """What came of each round: text, tokens, and whether they were a hit."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or token id of the request that ended it, if one did."""
    seed: int
    """With it, the same request gives the same answer again."""
    num_prompt_tokens: int | None
    """None for a request that was cancelled before it started, as is `metrics`."""
    prompt_token_ids: list[int]
    """What the model read before the output."""
    metrics: RequestMetrics | None

    @property
    def token_ids(self) -> list[int]:
        """All output tokens. An end-of-sequence token is among them, and not in the text."""
        return [token_id for block in self.blocks for token_id in block.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One entry a token, for a request that asks for them; else none."""
        return [entry for block in self.blocks for entry in block.logprobs or []]


class AsyncStream:
    """One request of an `AsyncClient`: iterate over its blocks; `answer` has the whole at the end."""

    def __init__(self, client: AsyncClient, request: Generate, name: str, timeout_s: float | None) -> None:
        """Made by `AsyncClient.stream`. Entering it sends the request, or else asking for the first block."""
        self.request_id = name
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._ends_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._news: asyncio.Queue[TextBlock | RequestFinished | RequestFailed | EngineDead] = asyncio.Queue()
        self._seed = 0
        self._blocks: list[TextBlock] = []
        self._answer: Answer | None = None
        self._is_cancelled = False
        self.is_over = False
        """Whether it was read to its end, or left."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # A loop that was left with `break` drops its stream, in whatever thread the garbage is collected.
        if self._loop is not None and not self.is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the connection
                self._loop.call_soon_threadsafe(
                    _cancel_soon, self._connection, Cancel(request_id=self._request.request_id)
                )

    async def start(self) -> None:
        """Send the request, if that was not done yet. Raises as `AsyncClient.generate` does."""
        if self._connection is not None or self.is_over:
            return
        async with self._limited():
            connection = await self._client.connected()
            if not self._is_cancelled:
                self._connection, self._loop = connection, asyncio.get_running_loop()
                await connection.send(self._request)

    def __aiter__(self) -> AsyncIterator[TextBlock]:
        return self

    async def __anext__(self) -> TextBlock:
        """The next block. Raises as `AsyncClient.generate` does."""
        if self.is_over:
            raise StopAsyncIteration
        news = await self._next_news()
        if isinstance(news, TextBlock):
            block = msgspec.structs.replace(news, request_id=self.request_id)
            self._blocks.append(block)
            return block
        self.end()
        match news:
            case EngineDead():
                raise news
            case RequestFailed() if not self._is_cancelled:
                raise RequestError(news.reason)
        self._answer = self._finished(news if isinstance(news, RequestFinished) else None)
        raise StopAsyncIteration

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises `RequestError` before the end, and for a stream that was left."""
        if self._answer is None:
            raise RequestError(f"request {shown(self.request_id)} has no answer: it was not read to its end")
        return self._answer

    def cancel(self) -> None:
        """End the request; the stream ends with what has come so far, and reason `cancelled`."""
        self._is_cancelled = True
        if self._connection is not None:
            self._connection.send_soon(Cancel(request_id=self._request.request_id))

    async def aclose(self) -> None:
        """Leave the stream; a request that is not finished is cancelled. May be called twice."""
        if not self.is_over:
            self.cancel()
            self.end()

    def take(self, message: Accepted | TextBlock | RequestFinished | RequestFailed) -> None:
        """News from the engine."""
        if isinstance(message, Accepted):
            self._seed = message.seed
        else:
            self._news.put_nowait(message)

    def lose(self, reason: str) -> None:
        """The engine is gone."""
        if self._connection is not None:  # else it was not sent yet, and the next engine may have it
            self._news.put_nowait(EngineDead(reason))

    async def _next_news(self) -> TextBlock | RequestFinished | RequestFailed | EngineDead:
        await self.start()
        if self._connection is None:
            return RequestFailed(request_id=self.request_id, reason="cancelled before it started")
        async with self._limited():
            return await self._news.get()

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Inside, the request's time runs; whatever is raised ends it."""
        if self._ends_at is None and self._timeout_s is not None:
            self._ends_at = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._ends_at):
                yield
        except BaseException as error:
            await self.aclose()
            if isinstance(error, TimeoutError):
                raise RequestTimeout(
                    f"request {shown(self.request_id)} took over {self._timeout_s:g} s; it was cancelled"
                ) from None
            raise

    def end(self) -> None:
        """No more will be read of it."""
        self.is_over = True
        self._client.forget(self.request_id, self._request.request_id)

    def _finished(self, end: RequestFinished | None) -> Answer:
        """end: None for a request that was cancelled before it started."""
        return Answer(
            request_id=self.request_id,
            text=end.text if end else "",
            blocks=self._blocks,
            finish_reason=end.finish_reason if end else FinishReason.CANCELLED,
            stop_reason=end.stop_reason if end else None,
            seed=self._seed,
            num_prompt_tokens=end.num_prompt_tokens if end else None,
            prompt_token_ids=end.prompt_token_ids if end else [],
            metrics=end.metrics if end else None,
        )


def _cancel_soon(connection: Connection | None, message: Cancel) -> None:
    if connection is not None:
        connection.send_soon(message)
