"""What a stage is: a plain class that handles messages. It never sees a socket, a process or Hydra.

The same stage runs in a process of its own (`pipeline.process`) and in one thread with all the
others (`pipeline.inprocess`), because all it knows of the world is its `StageContext`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.messages import Message, StageName
from pipeline.spans import SpanRecorder
from pipeline.tensor_pool import PoolSpec, TensorPool


class Outbox(Protocol):
    """Where a stage puts its messages. Sending never blocks; a full receiver raises `EngineDead`."""

    def send(self, receiver: StageName, message: Message) -> None:
        """Queue `message` for `receiver`. Messages from one sender to one receiver stay in order."""


class PoolExporter(Protocol):
    """Makes the tensor pools that this stage owns and other stages read."""

    def export(self, spec: PoolSpec) -> TensorPool:
        """Allocate a pool in memory that the other stages can map. Only during `Stage.setup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """All that a stage is given.

    settings: the resolved run configuration, msgpack bytes (the factory decodes them: the runtime
        carries settings, it does not read them).
    spans: where the stage notes what it did when, while a profile is on.
    """

    outbox: Outbox
    pools: PoolExporter
    settings: bytes
    spans: SpanRecorder = field(default_factory=SpanRecorder)


class KernelTracer(Protocol):
    """Traces what runs inside a stage, below its spans. Used by the stage's own thread."""

    def start(self) -> None:
        """Trace from now on."""

    def stop(self) -> bytes:
        """End the trace and return it, in a form that `tools.profile` knows."""


class Stage(ABC):
    """One actor. Life: constructor stores, `setup` allocates, `connect`, then `handle` and `work`, `close`.

    `accepts` is the union of message types its inbox decodes; anything else is refused at the door.
    """

    num_late_messages: int = 0
    """Messages about something that is over: dropped, and reported with the stage's figures."""
    accepts: Any
    """A `Message` subclass or a union of them."""

    @abstractmethod
    def setup(self) -> None:
        """Load models and export pools; may take long. Raises `ConfigError` for what a user can mend."""

    def connect(self, pools: Mapping[str, TensorPool]) -> None:  # noqa: B027 - optional hook
        """Receive the pools that other stages export, by name. Called once, after every `setup`."""

    @abstractmethod
    def handle(self, message: Any) -> None:
        """Take one message, of a type in `accepts`. A `ProtocolError` is logged and counted, not fatal."""

    def work(self) -> bool:
        """Do one slice of background work and return True, or return False when there is none.

        Called whenever the inbox is empty, so a slice bounds how long a message waits. A stage with
        nothing to do must return False: the loop then sleeps until the next message.
        """
        return False

    def kernel_tracer(self) -> KernelTracer | None:
        """A new tracer of this stage's kernels, for a profile that wants them; None where there are none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called twice, and after a failed `setup`."""
