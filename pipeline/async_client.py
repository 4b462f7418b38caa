"""Ask a running engine from asyncio: `AsyncClient`; see `pipeline.client`, whose thread it works for, too."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import msgspec

from pipeline.client_messages import Accepted, Cancel, EngineStats, Generate, GetStats, StatsReport
from pipeline.client_options import without_defaults
from pipeline.connection import Connection
from pipeline.errors import EngineDead, EngineUnreachable, RequestError, RequestTimeout, shown
from pipeline.given_prompt import Prompt, prompt_of
from pipeline.messages import (
    FinishReason,
    RequestFailed,
    RequestFinished,
    RequestMetrics,
    TextBlock,
    TokenLogprobs,
)

_STATS_TIMEOUT_S = 10.0
CLOSED = "the client is closed"


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


class AsyncClient:
    """A client for asyncio; one loop uses it at a time, and the next connects anew. Requests may run side by
    side."""

    def __init__(
        self, address: str, *, timeout_s: float | None = None, connect_timeout_s: float = 30.0
    ) -> None:
        """Store where the engine is. Connects on entering, or with the first request.

        address: what the engine was given as `listen=`.
        timeout_s: limit for each request that is given none of its own; None: no limit.
        connect_timeout_s: how long to wait for an engine that is still loading.
        Raises `RequestError` for a limit that is no number above 0, and `EngineUnreachable` for no address.
        """
        if not isinstance(address, str):
            raise EngineUnreachable(
                f"{shown(repr(address))} is no address: expected ipc:///PATH or tcp://HOST:PORT"
            )
        _check_limit("timeout_s", timeout_s)
        _check_limit("connect_timeout_s", connect_timeout_s)
        self._address = address
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that connected last."""
        self._is_closed = False
        self._connecting = asyncio.Lock()
        # Not held here, so that a stream that its program drops ends its request.
        self._by_name: WeakValueDictionary[str, AsyncStream] = WeakValueDictionary()
        self._by_number: WeakValueDictionary[str, AsyncStream] = WeakValueDictionary()
        """What the engine knows them by: a name may be used again before it has forgotten the first."""
        self._reports: dict[str, asyncio.Future[EngineStats]] = {}
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        await self.connected()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: object,
    ) -> Answer:
        """The whole answer to a prompt.

        request_id: a name for `cancel`, unique among this client's open requests.
        options: fields of `Sampling`, such as max_tokens, temperature, seed.
        Raises `RequestError` for a request that cannot be served, `RequestTimeout`, `EngineDead` when the
        engine ends meanwhile, and `EngineUnreachable`.
        """
        async with self.stream(prompt, request_id=request_id, timeout_s=timeout_s, **options) as stream:
            async for _ in stream:
                pass
            return stream.answer

    def stream(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: object,
    ) -> AsyncStream:
        """The answer block by block, as it is committed; takes and raises what `generate` does.

        A stream that is left ends its request: at the end of `async with`, else once it is garbage, which it
        is at once after a `break` out of `async for block in client.stream(...)`.
        """
        _check_limit("timeout_s", timeout_s)
        number = self._new_number()
        name = f"request-{number}" if request_id is None else request_id
        if name in self._by_name:
            raise RequestError(f"request id {shown(name)} is in use; choose another")
        given = prompt_of(prompt)
        request = Generate(
            request_id=number,
            prompt=given.prompt,
            chat=given.chat,
            prompt_token_ids=given.prompt_token_ids,
            options=without_defaults(options),
        )
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        stream = AsyncStream(self, request, name, limit_s)
        self._by_name[name] = self._by_number[number] = stream
        return stream

    async def cancel(self, request_id: str) -> None:
        """End a request; its answer comes with finish reason `cancelled`. Unknown ids are ignored."""
        stream = self._by_name.get(request_id)
        if stream is not None:
            stream.cancel()

    async def stats(self) -> EngineStats:
        """Figures of the engine. Raises `EngineDead`, `EngineUnreachable`, `RequestTimeout`."""
        connection = await self.connected()
        request_id = self._new_number()
        report = self._reports[request_id] = asyncio.get_running_loop().create_future()
        try:
            await connection.send(GetStats(request_id=request_id))
            return await asyncio.wait_for(report, _STATS_TIMEOUT_S)
        except TimeoutError:
            raise RequestTimeout(f"the engine did not report within {_STATS_TIMEOUT_S:g} s") from None
        finally:
            del self._reports[request_id]

    async def close(self) -> None:
        """Cancel what is in flight and disconnect. May be called twice."""
        self._is_closed = True
        for stream in list(self._by_name.values()):
            stream.cancel()
        self._fail_all(CLOSED)
        if self._connection is not None:
            self._connection.close()

    # --- for the streams --------------------------------------------------------------------------------

    async def connected(self) -> Connection:
        """The open connection, or a new one. Raises `EngineDead` once closed, `EngineUnreachable`, and
        `RequestError` while another loop runs with it."""
        self._take_loop(asyncio.get_running_loop())
        async with self._connecting:
            self._check_open()
            if self._connection is not None:
                if self._connection.loss is None:
                    return self._connection
                self._connection.close()
                self._connection = None
            connection = Connection(self._address, on_message=self._take, on_loss=self._fail_all)
            try:
                await connection.open(self._connect_timeout_s)
                self._check_open()
            except BaseException:
                connection.close()
                raise
            self._connection = connection
            return connection

    def _take_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this loop have the client. What is left of one that has ended would never wake anybody."""
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RequestError("this AsyncClient is used by another asyncio loop; make one for each loop")
        self._fail_all("the asyncio loop that asked has ended")
        if self._connection is not None:
            self._connection.close()
        self._connection, self._loop, self._connecting = None, loop, asyncio.Lock()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDead(CLOSED)

    def forget(self, name: str, number: str) -> None:
        """The request is over, and its name free again."""
        self._by_name.pop(name, None)
        self._by_number.pop(number, None)

    def _new_number(self) -> str:
        return str(next(self._numbers))

    def _take(self, message: object) -> None:
        match message:
            case StatsReport():
                report = self._reports.get(message.request_id)
                if report is not None and not report.done():
                    report.set_result(message.stats)
            case Accepted() | TextBlock() | RequestFinished() | RequestFailed():
                stream = self._by_number.get(message.request_id)
                if stream is not None:  # else the last words of a request that was left
                    stream.take(message)

    def _fail_all(self, reason: str) -> None:
        for stream in list(self._by_name.values()):
            stream.lose(reason)
        for report in self._reports.values():
            if not report.done():
                report.set_exception(EngineDead(reason))


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


def _check_limit(name: str, limit_s: float | None) -> None:
    """Raise `RequestError` for what is no limit."""
    if limit_s is None:
        return
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
        raise RequestError(f"{name}={shown(repr(limit_s))}: expected a number of seconds above 0; correct it")
