"""How the supervisor and a stage process talk about the stage's life: messages, and the two ends.

In order: Hello, Start, Ready, Connect, Connected, then ReportStats and StageStats at will, Stop, Stopped;
StageFailed at any time. While it is running, StartProfile is answered with ProfileStarted, EndProfile with
StageProfile. The channel is apart from the inboxes, so that a full inbox never delays a stop.
Frames that are no control message are counted, logged and dropped, as in `pipeline.mailbox`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import zmq
from msgspec import Meta

from pipeline.errors import EngineDead
from pipeline.log import WarnOnce, get_logger
from pipeline.mailbox import can_receive
from pipeline.messages import StageName
from pipeline.shm_memory import PoolExport
from pipeline.spans import MAX_NUM_SPANS, SpanDump

_LINGER_MS = 1000

_log = get_logger(__name__)


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of the control messages; the tag is the class name."""


# --- from a stage to the supervisor -------------------------------------------------------------------


class Hello(ControlMessage, frozen=True, kw_only=True):
    """The process runs and listens."""

    pid: int


class Ready(ControlMessage, frozen=True, kw_only=True):
    """`Stage.setup` is done."""

    exports: list[PoolExport]


class Connected(ControlMessage, frozen=True, kw_only=True):
    """All pools are mapped: their files may be unlinked. The stage now takes messages."""


class StageStats(ControlMessage, frozen=True, kw_only=True):
    """Figures of one stage since it is running."""

    num_received: int
    num_sent: int
    num_dropped: int
    """Frames that were no message for this stage."""
    num_refused: int
    """Messages that the stage answered with a `ProtocolError`."""
    num_late: int
    """Messages about something that was over."""
    busy_ns: int
    """Time in `handle`, and in `work` that did something."""
    transit_ns: int
    """Time the received messages spent under way and waiting, summed."""


class ProfileStarted(ControlMessage, frozen=True, kw_only=True):
    """Spans are recorded from here on."""


class StageProfile(ControlMessage, frozen=True, kw_only=True):
    """What one stage recorded."""

    spans: SpanDump
    kernel_trace: bytes | None
    """What `Stage.kernel_tracer` gave, if it was asked for."""


class Stopped(ControlMessage, frozen=True, kw_only=True):
    """The stage is closed; the process ends."""

    stats: StageStats | None
    """None when it never ran."""


class StageFailed(ControlMessage, frozen=True, kw_only=True):
    """The stage cannot go on; the process ends."""

    is_user_error: bool
    """A `ConfigError`: `reason` is for the user as it is."""
    reason: str
    """The error's message; with its type in front, and in one line, unless it is a user error."""
    traceback: str = ""
    """Of a user error none."""


# --- from the supervisor to a stage -------------------------------------------------------------------


class Start(ControlMessage, frozen=True, kw_only=True):
    """Build the stage and set it up."""

    factory: str
    """`package.module:function`, called with the `StageContext`."""
    settings: bytes
    addresses: dict[StageName, str]
    """Every inbox of this run, this stage's own included."""
    epoch: int
    high_water_mark: int


class Connect(ControlMessage, frozen=True, kw_only=True):
    """Map these pools, then run."""

    pools: list[PoolExport]


class ReportStats(ControlMessage, frozen=True, kw_only=True):
    """Answer with `StageStats`."""


class StartProfile(ControlMessage, frozen=True, kw_only=True):
    """Forget what was recorded, and record from now on."""

    num_spans: Annotated[int, Meta(ge=1, le=MAX_NUM_SPANS)]
    """Size of the ring: how many spans are kept, the latest."""
    traces_kernels: bool
    """Also trace what runs inside a stage that can do that; it slows the stage down."""


class EndProfile(ControlMessage, frozen=True, kw_only=True):
    """Record nothing more, and answer with `StageProfile`."""


class Stop(ControlMessage, frozen=True, kw_only=True):
    """Close and end."""


FromStage = Hello | Ready | Connected | StageStats | ProfileStarted | StageProfile | Stopped | StageFailed
ToStage = Start | Connect | ReportStats | StartProfile | EndProfile | Stop


class ControlServer:
    """The supervisor's end, for all stages.

    num_dropped: frames that were no control message of a stage.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.num_dropped = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromStage)
        self._names = {name.value.encode(): name for name in StageName}
        self._warn_once = WarnOnce(_log)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    def send(self, stage: StageName, message: ToStage) -> None:
        """Send to one stage that said Hello. If it is gone the message is lost: watch the process."""
        self.socket.send_multipart([stage.value.encode(), self._encoder.encode(message)], zmq.DONTWAIT)

    def receive(self) -> list[tuple[StageName, FromStage]]:
        """Everything that waits. Never blocks, never raises."""
        messages = []
        while can_receive(self.socket):
            frames = self.socket.recv_multipart(zmq.DONTWAIT)
            try:
                identity, payload = frames
                messages.append((self._names[identity], self._decoder.decode(payload)))
            except (ValueError, KeyError, RecursionError) as error:
                # msgspec's and Unicode errors are ValueErrors, as is another number of frames.
                self.num_dropped += 1
                self._warn_once("control", "dropped what arrived on the control socket: %r", error)
        return messages

    def close(self) -> None:
        """Unbind. May be called twice."""
        self.socket.close()


class ControlClient:
    """A stage's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, stage: StageName) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToStage)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, stage.value.encode())
        # The last word of a failing stage is its traceback: let it out before the process ends.
        self.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.socket.connect(address)

    def send(self, message: FromStage) -> None:
        """Queue one message for the supervisor."""
        self.socket.send(self._encoder.encode(message), zmq.DONTWAIT)

    def receive(self) -> ToStage | None:
        """The next message, or None when none waits. Never blocks."""
        if not can_receive(self.socket):
            return None
        return self._decoder.decode(self.socket.recv(zmq.DONTWAIT))

    def wait(self) -> ToStage:
        """The next message, however long it takes: the supervisor keeps the time."""
        return self._decoder.decode(self.socket.recv())

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self.socket.close()


def unexpected(message: object, expected: str) -> EngineDead:
    """The error for a control message out of turn."""
    return EngineDead(f"expected {expected} on the control channel, got {type(message).__name__}")
