"""Delivery to the clients of an engine: never blocking, each client by itself.

A client that reads slowly has its messages kept here, up to a bound, and delays nobody else. One whose
connection is gone shows when something cannot be delivered to it. Knows nothing of requests or engines.
"""

from __future__ import annotations

from collections import deque

import msgspec
import zmq

from pipeline.messages import Message

MOST_UNSENT = 10_000
"""Messages kept for a client that does not read, besides the 1,000 or so in its sockets."""


class Peers:
    """Sends to the clients of a ROUTER socket (with ROUTER_MANDATORY set), by their routing ids."""

    def __init__(self, socket: zmq.Socket[bytes], *, most_unsent: int = MOST_UNSENT) -> None:
        self._socket = socket
        self._most_unsent = most_unsent
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent: dict[bytes, deque[bytes]] = {}

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for a client to read."""
        return bool(self._unsent)

    def send(self, peer: bytes, message: Message) -> bool:
        """Send, or keep for later; False when the client is gone."""
        payload = self._encoder.encode(message)
        unsent = self._unsent.get(peer)
        if unsent is not None:
            unsent.append(payload)
            return True
        try:
            self._transmit(peer, payload)
        except zmq.Again:
            self._unsent[peer] = deque([payload])
        except zmq.ZMQError:
            return False
        return True

    def flush(self) -> list[bytes]:
        """Send what was kept, as far as the clients read; returns those that are gone."""
        gone = []
        for peer, unsent in list(self._unsent.items()):
            try:
                while unsent:
                    self._transmit(peer, unsent[0])
                    unsent.popleft()
                del self._unsent[peer]
            except zmq.Again:
                continue
            except zmq.ZMQError:
                gone.append(peer)
                del self._unsent[peer]
        return gone

    def overfull(self) -> list[bytes]:
        """Clients for whom more is kept than may be."""
        return [peer for peer, unsent in self._unsent.items() if len(unsent) > self._most_unsent]

    def forget(self, peer: bytes) -> None:
        """Drop what is kept for a client."""
        self._unsent.pop(peer, None)

    def _transmit(self, peer: bytes, payload: bytes) -> None:
        self._socket.send_multipart([peer, payload], zmq.DONTWAIT)
