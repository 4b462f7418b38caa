"""Serves many clients with one engine: `python -m pipeline.run listen=ADDRESS`.

One ROUTER socket in the frontend process takes `Generate`, `Cancel` and `GetStats` from every client
(`pipeline.client`) and gives each its own news. The stages see numbers of our own instead of the clients'
request ids, so that clients cannot collide. As many requests as share rounds are with the stages, and two
more, so that there is always a next one; the others wait here and get their turns client by client.

What clients send is decoded and checked, or answered with `Refused`. A client that is gone has its requests
cancelled within a second or two; one that does not read has them cancelled when too much is kept for it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import zmq

from conf.schema import RunConfig
from pipeline.client_messages import (
    LARGEST_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    EngineEnded,
    EngineStats,
    Generate,
    GetStats,
    Open,
    Probe,
    Refused,
    StatsReport,
    ToEngine,
    Welcome,
)
from pipeline.client_options import resolve_options
from pipeline.errors import EngineDead, RequestError
from pipeline.given_prompt import check_length, check_prompt
from pipeline.interrupts import Interrupts
from pipeline.listen_address import BoundAddress, ListenAddress
from pipeline.log import WarnOnce, get_logger
from pipeline.mailbox import can_receive
from pipeline.messages import FrontendMessage, Message, RequestFailed, RequestFinished, Sampling
from pipeline.peers import Peers
from pipeline.placement import plan_cores
from pipeline.running_engine import RunningEngine
from pipeline.topology import usable_cores

_WAIT_S = 0.2
"""How long to wait for news before looking for a signal."""
_BURST = 256
"""Frames taken from clients before the engine's news are looked at again."""
_NUM_AHEAD = 2
"""Requests handed to the stages beyond those that share rounds."""
_MOST_WAITING = 4096
"""Requests of one client that may wait for their turn."""
_PROBE_S = 1.0
_STATS_S = 0.05
"""How long the stages may take to report: everybody else waits meanwhile."""
_STATS_AGE_S = 0.5
_LINGER_MS = 1000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 30_000

_log = get_logger(__name__)


@contextmanager
def listening(config: RunConfig, address: ListenAddress) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """The socket for clients, bound, and the address as clients name it.

    Bound before the models are loaded, so that an address in use is told at once; clients that come early
    wait. Raises `ConfigError`.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        for core in plan_cores(config.placement, usable_cores()).draft:  # never the target's
            context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        with BoundAddress(socket, address) as bound:
            yield socket, bound.text
    finally:
        context.destroy(linger=_LINGER_MS)


@dataclass(slots=True, kw_only=True)
class _Ticket:
    """A request of a client."""

    peer: bytes
    request_id: str
    """The client's."""
    message: Generate
    sampling: Sampling
    came_ns: int
    number: str | None = None
    """What the stages know it by, once it is with them."""
    is_cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class _Client:
    """A client that has requests."""

    tickets: dict[str, _Ticket] = field(default_factory=dict)
    """All of them, by the client's ids."""
    waiting: deque[_Ticket] = field(default_factory=deque)


class Server:
    """The requests of all clients, from the socket to the engine and back."""

    def __init__(
        self,
        engine: RunningEngine,
        socket: zmq.Socket[bytes],
        config: RunConfig,
        *,
        peers: Peers | None = None,
    ) -> None:
        """socket: a bound ROUTER, see `listening`."""
        self._engine = engine
        self._socket = socket
        self._config = config
        self._peers = peers or Peers(socket)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._warn_once = WarnOnce(_log)
        self._clients: dict[bytes, _Client] = {}
        self._turns: deque[bytes] = deque()
        """Clients with waiting requests, the one whose turn is next first."""
        self._running: dict[str, _Ticket | None] = {}
        """Requests with the stages, by number; None: nobody wants its news any more."""
        self._num_submitted = 0
        self._counts: Counter[str] = Counter()
        self._began = time.monotonic()
        self._probe_at = self._began
        self._busy_seconds: dict[str, float] = {}
        self._busy_at = -_STATS_AGE_S
        engine.wake_on(socket)

    def run(self, interrupts: Interrupts) -> None:
        """Serve until a signal comes, and tell the clients.

        Raises `EngineDead` when a stage was lost, and tells the clients that too.
        """
        try:
            while interrupts.received is None:
                for event in self._engine.events(_WAIT_S):
                    self._pass_on(event)
                self._take_frames()
                self._submit_waiting()
                self._look_after_clients()
            self._tell_everybody(f"the engine was stopped ({interrupts.received.name})")
        except EngineDead as error:
            self._tell_everybody(str(error))
            raise

    # --- from the clients -------------------------------------------------------------------------------

    def _take_frames(self) -> None:
        for _ in range(_BURST):
            if not can_receive(self._socket):
                return
            peer, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"expected 1 frame, got {len(frames)}")
                message: ToEngine = self._decoder.decode(frames[0])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._refuse(peer, str(error))
                continue
            self._handle(peer, message)

    def _handle(self, peer: bytes, message: ToEngine) -> None:
        match message:
            case Open():
                self._welcome(peer, message)
            case Generate():
                self._accept(peer, message)
            case Cancel():
                self._cancel(peer, message.request_id)
            case GetStats():
                self._send(peer, StatsReport(request_id=message.request_id, stats=self._stats()))

    def _refuse(self, peer: bytes, reason: str) -> None:
        self._counts["refused"] += 1
        self._warn_once("refused", "refused what a client sent: %s (said once, counted always)", reason)
        self._send(peer, Refused(reason=f"this is no message for an engine: {reason}"))

    def _welcome(self, peer: bytes, message: Open) -> None:
        if message.protocol != PROTOCOL_VERSION:
            versions = f"the engine speaks version {PROTOCOL_VERSION}, the client {message.protocol}"
            self._send(peer, Refused(reason=f"{versions}; update one of them"))
            return
        model, max_requests = self._config.model.path or "", self._config.max_requests
        self._send(peer, Welcome(protocol=PROTOCOL_VERSION, model=model, max_requests=max_requests))

    def _accept(self, peer: bytes, message: Generate) -> None:
        client = self._clients.get(peer, _Client())
        try:
            if message.request_id in client.tickets:
                raise RequestError(f"request id {message.request_id!r} is in use; choose another")
            if len(client.waiting) >= _MOST_WAITING:
                raise RequestError(
                    f"{_MOST_WAITING} requests of this client wait already; await some answers"
                )
            # Before anything that takes its time for each id: everybody else waits meanwhile.
            check_length(message.prompt_token_ids, max_context=self._config.model.max_context)
            check_prompt(prompt=message.prompt, chat=message.chat, prompt_token_ids=message.prompt_token_ids)
            sampling = resolve_options(message.options, self._config)
        except RequestError as error:
            self._counts["failed"] += 1
            self._send(peer, RequestFailed(request_id=message.request_id, reason=str(error)))
            return
        ticket = _Ticket(
            peer=peer,
            request_id=message.request_id,
            message=message,
            sampling=sampling,
            came_ns=time.monotonic_ns(),
        )
        self._clients[peer] = client
        client.tickets[ticket.request_id] = ticket
        client.waiting.append(ticket)
        if len(client.waiting) == 1:
            self._turns.append(peer)
        self._send(peer, Accepted(request_id=ticket.request_id, seed=sampling.seed))

    def _cancel(self, peer: bytes, request_id: str) -> None:
        client = self._clients.get(peer)
        ticket = client.tickets.get(request_id) if client else None
        if client is None or ticket is None:
            return
        if ticket.number is not None:
            if not ticket.is_cancelled:  # a stage that reads its mail computes nothing meanwhile
                ticket.is_cancelled = True
                self._engine.cancel(ticket.number)
            return
        client.waiting.remove(ticket)
        if not client.waiting:
            self._turns.remove(peer)
        self._counts["failed"] += 1
        self._end(ticket)
        self._send(peer, RequestFailed(request_id=request_id, reason="cancelled before it started"))

    # --- to and from the engine -------------------------------------------------------------------------

    def _submit_waiting(self) -> None:
        while self._turns and len(self._running) < self._config.max_requests + _NUM_AHEAD:
            peer = self._turns.popleft()
            client = self._clients[peer]
            ticket = client.waiting.popleft()
            if client.waiting:
                self._turns.append(peer)
            self._num_submitted += 1
            number = ticket.number = str(self._num_submitted)
            self._running[number] = ticket
            try:
                self._engine.submit(
                    request_id=number,
                    prompt=ticket.message.prompt,
                    chat=ticket.message.chat,
                    prompt_token_ids=ticket.message.prompt_token_ids,
                    sampling=ticket.sampling,
                    submitted_ns=ticket.came_ns,
                )
            except RequestError as error:
                self._pass_on(RequestFailed(request_id=number, reason=str(error)))

    def _pass_on(self, event: FrontendMessage) -> None:
        """Give an event to the client whose request it is about."""
        ticket = self._running.get(event.request_id)
        if isinstance(event, RequestFinished | RequestFailed):
            self._count(event)
            self._running.pop(event.request_id, None)
            if ticket is not None:
                self._end(ticket)
        if ticket is not None:
            self._send(ticket.peer, msgspec.structs.replace(event, request_id=ticket.request_id))

    def _end(self, ticket: _Ticket) -> None:
        """Forget a request that has ended, and a client without any."""
        client = self._clients.get(ticket.peer)
        if client is not None:
            client.tickets.pop(ticket.request_id, None)
            if not client.tickets:
                del self._clients[ticket.peer]

    def _count(self, event: RequestFinished | RequestFailed) -> None:
        if isinstance(event, RequestFailed):
            self._counts["failed"] += 1
            return
        metrics = event.metrics
        self._counts.update(
            finished=1,
            output_tokens=event.num_output_tokens,
            rounds=metrics.num_rounds,
            proposed=metrics.num_proposed_tokens,
            accepted=metrics.num_accepted_tokens,
            hits=metrics.cache_hits or 0,
            misses=metrics.cache_misses or 0,
        )

    # --- the clients themselves -------------------------------------------------------------------------

    def _send(self, peer: bytes, message: Message) -> None:
        if not self._peers.send(peer, message):
            self._drop(peer)

    def _look_after_clients(self) -> None:
        """Send what was kept, and find the clients that are gone, or do not read."""
        for peer in self._peers.flush():
            self._drop(peer)
        for peer in self._peers.overfull():
            self._give_up(peer)
        if time.monotonic() >= self._probe_at:
            self._probe_at = time.monotonic() + _PROBE_S
            for peer in list(self._clients):
                self._send(peer, Probe())

    def _give_up(self, peer: bytes) -> None:
        """Cancel the requests of a client that does not read; it is told when it does."""
        self._peers.forget(peer)
        reason = "cancelled: too many messages wait for this client, which does not read them"
        self._warn_once("slow", "a client does not read its messages; its requests are cancelled")
        for request_id in self._drop(peer):
            self._peers.send(peer, RequestFailed(request_id=request_id, reason=reason))

    def _drop(self, peer: bytes) -> list[str]:
        """Cancel and forget all requests of a client, and return their ids. Those with the stages count when
        they have ended there."""
        self._peers.forget(peer)
        client = self._clients.pop(peer, None)
        if client is None:
            return []
        if client.waiting:
            self._turns.remove(peer)
            self._counts["failed"] += len(client.waiting)
        for ticket in client.tickets.values():
            if ticket.number is not None:
                self._running[ticket.number] = None
                if not ticket.is_cancelled:
                    self._engine.cancel(ticket.number)
        return list(client.tickets)

    def _tell_everybody(self, reason: str) -> None:
        for peer in self._clients:
            self._peers.send(peer, EngineEnded(reason=reason))

    def _stats(self) -> EngineStats:
        now = time.monotonic()
        if now - self._busy_at >= _STATS_AGE_S:
            figures = self._engine.stats(_STATS_S)
            self._busy_seconds = {name.value: stage.busy_ns / 1e9 for name, stage in figures.items()}
            self._busy_at = time.monotonic()
        counts = self._counts
        return EngineStats(
            uptime_s=now - self._began,
            num_clients=len(self._clients),
            num_running=len(self._running),
            num_waiting=sum(len(client.waiting) for client in self._clients.values()),
            num_finished=counts["finished"],
            num_failed=counts["failed"],
            num_refused=counts["refused"],
            num_output_tokens=counts["output_tokens"],
            num_rounds=counts["rounds"],
            num_proposed_tokens=counts["proposed"],
            num_accepted_tokens=counts["accepted"],
            cache_hits=counts["hits"],
            cache_misses=counts["misses"],
            busy_seconds=self._busy_seconds,
        )
