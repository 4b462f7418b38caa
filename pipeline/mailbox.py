"""Mail between stages over ZeroMQ: one bound inbox per stage, one outgoing socket per receiver.

A message is two frames: a header (sender, epoch, time sent) and the tagged message, both msgpack. The
receiver decodes it against the union of types it accepts. Whatever else arrives on the socket is
logged, counted and dropped: nothing from a socket is ever executed, and nothing that arrives can raise.
Sends never block: past the high-water mark they raise, because two stages blocked on each other would
hang in silence. This module knows nothing about what messages mean.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import zmq

from pipeline.errors import EngineDead
from pipeline.log import WarnOnce, get_logger
from pipeline.messages import Message, StageName
from pipeline.spans import SpanKind, SpanRecorder

HIGH_WATER_MARK = 65_536
"""Messages that may wait on each side of a connection: far above any honest backlog."""
_LARGEST_FRAME_BYTES = 1 << 28
_LINGER_MS = 200

_log = get_logger(__name__)


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who sent a message, in which run, and when (`time.monotonic_ns`)."""

    sender: StageName
    epoch: int
    sent_ns: int


def can_receive(socket: zmq.Socket[bytes]) -> bool:
    """Whether a whole message waits on `socket`; cheaper than to try and catch."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Inbox:
    """The one place where messages for a stage arrive.

    num_received, num_dropped: messages taken, and frames refused.
    transit_ns: time that the received messages spent between send and receive, summed.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        accepts: Any,
        senders: Collection[StageName],
        epoch: int,
        high_water_mark: int = HIGH_WATER_MARK,
        spans: SpanRecorder | None = None,
    ) -> None:
        """Bind at `address` and take messages of the types `accepts` from `senders` in run `epoch`."""
        self._spans = spans or SpanRecorder()
        self.num_received = 0
        self.num_dropped = 0
        self.transit_ns = 0
        self._senders = frozenset(senders)
        self._epoch = epoch
        self._header_decoder = msgspec.msgpack.Decoder(Header)
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._warn_once = WarnOnce(_log)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_FRAME_BYTES)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    def receive(self) -> tuple[StageName, Message] | None:
        """The next message and its sender, or None when nothing (good) waits. Never blocks, never raises."""
        while can_receive(self.socket):
            began_ns = time.monotonic_ns()
            message = self._decode(self.socket.recv_multipart(zmq.DONTWAIT), began_ns)
            if message is not None:
                return message
        return None

    def close(self) -> None:
        """Unbind. May be called twice."""
        self.socket.close()

    def _decode(self, frames: list[bytes], began_ns: int) -> tuple[StageName, Message] | None:
        """The sender and the message, or None after counting why not. began_ns: when it was looked for."""
        if len(frames) != 2:
            self._drop("frames", f"expected 2 frames, got {len(frames)}")
            return None
        kind = "header"
        try:
            header = self._header_decoder.decode(frames[0])
            kind = f"message from {header.sender.value}"
            message: Message = self._decoder.decode(frames[1])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._drop(kind, f"{kind}: {error}")
            return None
        if header.epoch != self._epoch:
            self._drop("epoch", f"expected epoch {self._epoch}, got {header.epoch}")
            return None
        if header.sender not in self._senders:
            self._drop("sender", f"{header.sender.value} sends nothing to this stage")
            return None
        self.num_received += 1
        now_ns = time.monotonic_ns()
        self.transit_ns += now_ns - header.sent_ns
        if self._spans.is_on:
            self._spans.add_message(
                SpanKind.RECEIVE,
                began_ns,
                now_ns,
                message=message,
                peer=header.sender,
                sent_ns=header.sent_ns,
            )
        return header.sender, message

    def _drop(self, kind: str, reason: str) -> None:
        self.num_dropped += 1
        self._warn_once(kind, "dropped what arrived in the inbox: %s (said once, counted always)", reason)


class MailOutbox:
    """The way out of one stage: a connection per receiver.

    num_sent: messages queued so far.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Mapping[StageName, str],
        *,
        sender: StageName,
        epoch: int,
        high_water_mark: int = HIGH_WATER_MARK,
        spans: SpanRecorder | None = None,
    ) -> None:
        """Connect to `addresses`; the receivers may bind later, messages wait for them."""
        self.num_sent = 0
        self._spans = spans or SpanRecorder()
        self._sender = sender
        self._epoch = epoch
        self._high_water_mark = high_water_mark
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets: dict[StageName, zmq.Socket[bytes]] = {}
        for receiver, address in addresses.items():
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, high_water_mark)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.connect(address)
            self._sockets[receiver] = socket

    def send(self, receiver: StageName, message: Message) -> None:
        """Queue one message.

        Raises `EngineDead` when too many wait for the receiver, and `LookupError` when it is not part of
        this run.
        """
        socket = self._sockets.get(receiver)
        if socket is None:
            raise LookupError(
                f"{self._sender.value} sent {type(message).__name__} to {receiver.value}, which is not part "
                f"of this run: {', '.join(name.value for name in self._sockets)}"
            )
        began_ns = time.monotonic_ns()
        encode = self._encoder.encode
        payload = encode(message)
        sent_ns = time.monotonic_ns()
        header = encode(Header(self._sender, self._epoch, sent_ns))
        try:
            socket.send(header, zmq.SNDMORE | zmq.DONTWAIT)
            socket.send(payload, zmq.DONTWAIT)
        except zmq.Again:
            raise EngineDead(
                f"{receiver.value} does not keep up: over {self._high_water_mark} messages from "
                f"{self._sender.value} wait for it; it hangs, or is far too slow"
            ) from None
        self.num_sent += 1
        if self._spans.is_on:
            self._spans.add_message(
                SpanKind.SEND,
                began_ns,
                time.monotonic_ns(),
                message=message,
                peer=receiver,
                sent_ns=sent_ns,
            )

    def close(self) -> None:
        """Disconnect. May be called twice."""
        for socket in self._sockets.values():
            socket.close()
