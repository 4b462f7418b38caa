"""Ask a running engine from Python: `Client`, and `AsyncClient` for asyncio. Imports no torch.

    python -m pipeline.run conf=saguaro listen=ipc:///tmp/saguaro.sock

    with Client("ipc:///tmp/saguaro.sock") as client:
        answer = client.generate([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64)
        for block in client.stream("Once upon a time", temperature=0.8, seed=7):
            print(block.text, end="", flush=True)

A text is a raw prompt, `{"prompt_token_ids": [1, 2, 3]}` one that is encoded already; a list of turns is a
conversation, which goes through the model's chat template.
Options are the fields of `pipeline.messages.Sampling`, and `response_format` as in the OpenAI API; those left
out are as the engine was started with. A stream has one `TextBlock` for each committed block of tokens.

When the engine ends, requests in flight raise `EngineDead`; the next request connects again, to whatever
engine serves at the address by then. A client that is closed, a stream that is left, a request that times
out and a task that is cancelled end their requests in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Self, TypeVar

from pipeline.async_client import CLOSED, AsyncClient
from pipeline.async_stream import Answer, AsyncStream
from pipeline.client_messages import EngineStats
from pipeline.errors import EngineDead
from pipeline.given_prompt import Prompt
from pipeline.messages import TextBlock

__all__ = ["Answer", "AsyncClient", "AsyncStream", "Client", "Prompt", "Stream"]

_CLOSE_S = 1.0
"""How long the requests of other threads may take to notice that their client was closed."""
_T = TypeVar("_T")


class Client:
    """A client for plain Python; any number of threads may use it at once.

    It runs an `AsyncClient` in a thread of its own, so that it works where an asyncio loop runs already, in a
    notebook for example, and notices a lost engine at once.
    """

    def __init__(
        self, address: str, *, timeout_s: float | None = None, connect_timeout_s: float = 30.0
    ) -> None:
        """Takes what `AsyncClient` takes."""
        # First, because it refuses what cannot be: no thread is left behind then.
        self._client = AsyncClient(address, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="saguaro-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        try:
            self._run(self._client.connected())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: object,
    ) -> Answer:
        """The whole answer to a prompt; see `AsyncClient.generate`."""
        return self._run(self._client.generate(prompt, request_id=request_id, timeout_s=timeout_s, **options))

    def stream(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: object,
    ) -> Stream:
        """The answer block by block; see `AsyncClient.stream`. The request is sent at once."""

        async def make() -> AsyncStream:
            stream = self._client.stream(prompt, request_id=request_id, timeout_s=timeout_s, **options)
            await stream.start()
            return stream

        return Stream(self, self._run(make()))

    def cancel(self, request_id: str) -> None:
        """End a request of any thread; its answer comes with finish reason `cancelled`."""
        self._run(self._client.cancel(request_id))

    def stats(self) -> EngineStats:
        """Figures of the engine."""
        return self._run(self._client.stats())

    def close(self) -> None:
        """Cancel what is in flight and disconnect. May be called twice, and while other threads ask."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if not is_first:
            self._thread.join()
            return
        # Whatever another thread handed over came before this, so it is ended by it.
        asyncio.run_coroutine_threadsafe(_end_everything(self._client), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine in the loop's thread; Ctrl-C cancels it."""
        with self._lock:
            if self._is_closed:
                coroutine.close()
                raise EngineDead(CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise EngineDead(CLOSED) from None
        except BaseException:
            future.cancel()
            raise


class Stream:
    """One request of a `Client`: iterate over its blocks; `answer` has the whole at the end."""

    def __init__(self, client: Client, stream: AsyncStream) -> None:
        """Made by `Client.stream`."""
        self.request_id = stream.request_id
        self._client = client
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[TextBlock]:
        return self

    def __next__(self) -> TextBlock:
        """The next block. Raises as `AsyncClient.generate` does."""
        block = self._client._run(_next_or_none(self._stream))
        if block is None:
            raise StopIteration
        return block

    def __del__(self) -> None:
        # A loop that was left with `break` drops its stream, and with it the request.
        with contextlib.suppress(Exception):
            self._client._loop.call_soon_threadsafe(_leave, self._stream)

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises `RequestError` before the end, and for a stream that was left."""
        return self._stream.answer

    def cancel(self) -> None:
        """End the request; the stream ends with what has come so far, and reason `cancelled`."""
        self._client.cancel(self.request_id)

    def close(self) -> None:
        """Leave the stream; a request that is not finished is cancelled. May be called twice."""
        with contextlib.suppress(EngineDead):  # a client that is closed has cancelled it
            self._client._run(self._stream.aclose())


async def _end_everything(client: AsyncClient) -> None:
    """Close the client, and let no other coroutine of its loop wait for ever."""
    await client.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=_CLOSE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def _next_or_none(stream: AsyncStream) -> TextBlock | None:
    async for block in stream:
        return block
    return None


def _leave(stream: AsyncStream) -> None:
    if not stream.is_over:
        stream.cancel()
        stream.end()
