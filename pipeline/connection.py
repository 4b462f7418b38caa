"""One connection of a client to an engine: opened, watched, and over when the engine is gone.

A connection never comes back: after a loss its requests have failed, and the client opens another. So nothing
that was meant for one engine reaches its successor at the same address. Runs in an asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pipeline.client_messages import (
    LARGEST_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    EngineEnded,
    Open,
    Refused,
    ToClient,
    ToEngine,
    Welcome,
)
from pipeline.errors import EngineDead, EngineUnreachable, RequestError, shown_path

_LAST_WORDS_S = 0.2
"""After a connection broke: time for what had arrived before to be read."""
_LINGER_MS = 500
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 30_000


class Connection:
    """An open connection; `open_connection` makes one.

    welcome: what the engine said of itself.
    loss: why the connection is over, or None while it holds.
    """

    def __init__(
        self, address: str, *, on_message: Callable[[Any], None], on_loss: Callable[[str], None]
    ) -> None:
        """on_message is called for each message about a request, on_loss once if the engine is gone."""
        self.welcome: Welcome | None = None
        self.loss: str | None = None
        self._address = address
        self._on_message = on_message
        self._on_loss = on_loss
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._answered = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, _LINGER_MS),
            (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    async def open(self, timeout_s: float) -> None:
        """Connect and wait for the engine's welcome.

        Raises `EngineUnreachable` when none comes in time, and `EngineDead` if the engine ends meanwhile.
        """
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            raise EngineUnreachable(
                f"{shown_path(self._address)} is no address: {error}; expected ipc:///PATH or tcp://HOST:PORT"
            ) from None
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        await self._post(Open(protocol=PROTOCOL_VERSION))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._answered.wait(), timeout_s)
        if self.loss is not None:
            raise EngineDead(self.loss)
        if self.welcome is None:
            raise EngineUnreachable(
                f"no engine answers at {shown_path(self._address)} (waited {timeout_s:g} s); start one with "
                f"python -m pipeline.run conf=saguaro listen={shown_path(self._address)}"
            )

    async def send(self, message: ToEngine) -> None:
        """Send a message. Raises `EngineDead` after a loss, and `RequestError` for one that is too large."""
        if self.loss is not None:
            raise EngineDead(self.loss)
        await self._post(message)

    def send_soon(self, message: ToEngine) -> None:
        """Send a message if the connection still holds, and do not wait."""
        if self.loss is None and not self._socket.closed:
            self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """Close; what was sent gets half a second to leave. May be called twice."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=_LINGER_MS if self.loss is None and self.welcome else 0)
        if not self._context.closed:
            self._context.term()

    async def _post(self, message: ToEngine) -> None:
        try:
            payload = self._encoder.encode(message)
        except (
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:  # half a surrogate pair, a set
            raise RequestError(f"the request cannot be sent: {error}") from None
        if len(payload) > LARGEST_MESSAGE_BYTES:
            raise RequestError(
                f"the request has {len(payload)} bytes, expected at most {LARGEST_MESSAGE_BYTES}; shorten it"
            )
        await self._socket.send(payload)

    async def _receive(self) -> None:
        while True:
            payload = await self._socket.recv()
            try:
                message: ToClient = self._decoder.decode(payload)
            except msgspec.MsgspecError as error:
                self._lose(
                    f"what answers at {shown_path(self._address)} is no engine of this version: {error}"
                )
                return
            match message:
                case Welcome():
                    self.welcome = message
                    self._answered.set()
                case Refused():
                    self._lose(f"the engine refused what this client sent: {message.reason}")
                case EngineEnded():
                    self._lose(f"the engine at {shown_path(self._address)} ended: {message.reason}")
                case _:
                    self._on_message(message)

    async def _watch(self) -> None:
        """Notice when the engine's end of the connection is gone, whether it said so or not."""
        await recv_monitor_message(self._monitor)
        await asyncio.sleep(_LAST_WORDS_S)
        self._lose(
            f"the connection to the engine at {shown_path(self._address)} is lost: the engine has ended"
        )

    def _lose(self, reason: str) -> None:
        if self.loss is None:
            self.loss = reason
            self._answered.set()
            self._on_loss(reason)
