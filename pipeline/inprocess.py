"""All stages of a run in one thread: the same stages, messages and pools, without processes or sockets.

For tests and for debugging. Every message is really encoded and decoded against the receiver's
`accepts`, so a wrong field fails here as it would on a socket, only louder. Messages from one sender to
one receiver stay in order; beyond that a real run promises nothing, and `order_seed` shows it: it draws
the order of deliveries and of `work` slices, so that a test can prove that results do not depend on it.
This module knows nothing about models.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from pipeline.errors import EngineDead, ProtocolError
from pipeline.log import get_logger
from pipeline.messages import FrontendMessage, Message, StageName
from pipeline.stage import Stage, StageContext
from pipeline.tensor_pool import PoolSpec, TensorPool, pool_bytes

StageFactory = Callable[[StageContext], Stage]
Hold = Callable[[StageName, StageName, Message], bool]
"""(sender, receiver, message) -> True to keep the message, and all behind it from that sender, for now."""

_log = get_logger(__name__)


class InProcess:
    """Runs stages step by step: one step delivers one message or does one slice of background work.

    Without `order_seed` messages arrive in the order they were sent and `work` runs when none waits.

    outputs: every message sent to the frontend so far, in order.
    protocol_errors: the `ProtocolError`s that stages raised in `handle`; counted and survived, as in a
        real run, so a test that expects none should look.
    hold: may be set and cleared between runs, to delay chosen messages.
    """

    def __init__(
        self,
        stages: Mapping[StageName, StageFactory],
        settings: bytes = b"",
        order_seed: int | None = None,
        *,
        hold: Hold | None = None,
        frontend_accepts: Any = FrontendMessage,
    ) -> None:
        self.hold = hold
        self.outputs: list[Message] = []
        self.protocol_errors: list[tuple[StageName, ProtocolError]] = []
        self.stages: dict[StageName, Stage] = {}
        self._factories = dict(stages)
        self._settings = settings
        self._random = None if order_seed is None else random.Random(order_seed)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: dict[StageName, msgspec.msgpack.Decoder[Any]] = {
            StageName.FRONTEND: msgspec.msgpack.Decoder(frontend_accepts)
        }
        self._memory = _Memory()
        self._waiting: dict[tuple[StageName, StageName], deque[tuple[int, Message]]] = {}
        self._num_sent = 0
        self._received: Counter[StageName] = Counter()
        self._last_received: dict[StageName, Message] = {}
        self._is_started = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Build, set up and connect every stage. Done by the first `send` or run, if not before."""
        if self._is_started:
            return
        self._is_started = True
        for name, factory in self._factories.items():
            outbox = _Outbox(self, name)
            pools = _Exporter(self._memory, name)
            stage = factory(StageContext(outbox=outbox, pools=pools, settings=self._settings))
            self.stages[name] = stage
            self._decoders[name] = msgspec.msgpack.Decoder(stage.accepts)
        for stage in self.stages.values():
            stage.setup()
        for name, stage in self.stages.items():
            stage.connect(self._memory.readable_by(name))

    def send(self, receiver: StageName, message: Message) -> None:
        """Queue a message from the frontend."""
        self.start()
        self.post(StageName.FRONTEND, receiver, message)

    def post(self, sender: StageName, receiver: StageName, message: Message) -> None:
        """Encode and queue one message.

        Raises `TypeError` when `receiver` does not accept it (not `ProtocolError`, which a stage survives:
        it is a bug in the sender), and `LookupError` when there is no such receiver.
        """
        if receiver not in self._decoders:
            raise LookupError(
                f"{sender.value} sent {type(message).__name__} to {receiver.value}, "
                f"which is not part of this run: {', '.join(name.value for name in self.stages)}"
            )
        try:
            arrived = self._decoders[receiver].decode(self._encoder.encode(message))
        except (msgspec.ValidationError, TypeError) as error:
            raise TypeError(
                f"{sender.value} sent {receiver.value} a message it does not accept: {error}; got {message!r}"
            ) from error
        self._num_sent += 1
        if receiver is StageName.FRONTEND:
            self.outputs.append(arrived)
        else:
            self._waiting.setdefault((sender, receiver), deque()).append((self._num_sent, arrived))

    def run_until(self, predicate: Callable[[], bool], max_steps: int = 100_000) -> None:
        """Step until `predicate()` is true.

        Raises `EngineDead`, with what every stage waits for, when nothing is left to do or `max_steps`
        steps were not enough. Exceptions of the stages, `ProtocolError` in `handle` excepted, come through.
        """
        self.start()
        for _ in range(max_steps):
            if predicate():
                return
            if not self._step():
                raise EngineDead(f"nothing left to do, and the condition is not met\n{self.describe()}")
        if not predicate():
            raise EngineDead(f"the condition is not met after {max_steps} steps\n{self.describe()}")

    def run_until_idle(self, max_steps: int = 100_000) -> None:
        """Step until no message can be delivered and no stage has background work."""
        self.start()
        for _ in range(max_steps):
            if not self._step():
                return
        raise EngineDead(f"still busy after {max_steps} steps\n{self.describe()}")

    def describe(self) -> str:
        """What each stage received last and what waits for it, one line a stage."""
        lines = []
        for name in self.stages:
            last = self._last_received.get(name)
            line = f"  {name.value}: received {self._received[name]}, last {last!r}"
            for (sender, receiver), queue in self._waiting.items():
                if receiver is name and queue:
                    line += f"; {len(queue)} waiting from {sender.value}, first {queue[0][1]!r}"
            lines.append(line)
        lines += [f"  {name.value}: ProtocolError: {error}" for name, error in self.protocol_errors]
        return "\n".join(lines)

    def close(self) -> None:
        """Close every stage, those that export pools last. May be called twice."""
        exporters = self._memory.owners
        for name in sorted(self.stages, key=lambda name: name in exporters):
            self.stages[name].close()

    def _step(self) -> bool:
        """Deliver one message or do one slice of work; False when there is nothing of either."""
        ready = self._deliverable()
        if self._random is None:
            if ready:
                self._deliver(*ready[0])
                return True
            return any(stage.work() for stage in self.stages.values())
        # A stage with waiting messages may work first: on a socket they might not have arrived yet.
        choices: list[tuple[StageName, StageName] | StageName] = [*ready, *self.stages]
        self._random.shuffle(choices)
        for choice in choices:
            if isinstance(choice, tuple):
                self._deliver(*choice)
                return True
            if self.stages[choice].work():
                return True
        return False

    def _deliverable(self) -> list[tuple[StageName, StageName]]:
        """(sender, receiver) of the queues whose first message is not held, oldest first."""
        heads = [(queue[0], route) for route, queue in self._waiting.items() if queue]
        heads.sort(key=lambda head: head[0][0])
        return [route for (_, message), route in heads if not (self.hold and self.hold(*route, message))]

    def _deliver(self, sender: StageName, receiver: StageName) -> None:
        _, message = self._waiting[sender, receiver].popleft()
        self._received[receiver] += 1
        self._last_received[receiver] = message
        try:
            self.stages[receiver].handle(message)
        except ProtocolError as error:
            _log.warning("%s refused %s from %s: %s", receiver.value, message, sender.value, error)
            self.protocol_errors.append((receiver, error))


class _Outbox:
    """The outbox of one stage."""

    def __init__(self, runtime: InProcess, sender: StageName) -> None:
        self._runtime = runtime
        self._sender = sender

    def send(self, receiver: StageName, message: Message) -> None:
        self._runtime.post(self._sender, receiver, message)


class _Memory:
    """Pools in plain memory, and who exported them."""

    def __init__(self) -> None:
        self._pools: dict[str, tuple[StageName, TensorPool]] = {}

    @property
    def owners(self) -> set[StageName]:
        return {owner for owner, _ in self._pools.values()}

    def export(self, owner: StageName, spec: PoolSpec) -> TensorPool:
        if spec.name in self._pools:
            raise LookupError(f"{self._pools[spec.name][0].value} exports a pool {spec.name!r} already")
        memory = bytearray(pool_bytes(spec))
        self._pools[spec.name] = (owner, TensorPool(spec, memoryview(memory).toreadonly(), is_writable=False))
        return TensorPool(spec, memory, is_writable=True)

    def readable_by(self, reader: StageName) -> dict[str, TensorPool]:
        return {name: pool for name, (owner, pool) in self._pools.items() if owner is not reader}


class _Exporter:
    """The exporter of one stage."""

    def __init__(self, memory: _Memory, owner: StageName) -> None:
        self._memory = memory
        self._owner = owner

    def export(self, spec: PoolSpec) -> TensorPool:
        return self._memory.export(self._owner, spec)
