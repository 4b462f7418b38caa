"""Ask a running engine from asyncio: `AsyncClient`; see `pipeline.client`, whose thread it works for, too."""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from pipeline.async_stream import Answer, AsyncStream
from pipeline.client_messages import Accepted, EngineStats, Generate, GetStats, StatsReport
from pipeline.client_options import check_limit, without_defaults
from pipeline.connection import Connection
from pipeline.errors import EngineDead, EngineUnreachable, RequestError, RequestTimeout, shown
from pipeline.given_prompt import Prompt, prompt_of
from pipeline.messages import RequestFailed, RequestFinished, TextBlock

_STATS_TIMEOUT_S = 10.0
CLOSED = "the client is closed"


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
        check_limit("timeout_s", timeout_s)
        check_limit("connect_timeout_s", connect_timeout_s)
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
        check_limit("timeout_s", timeout_s)
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
