"""What clients and an engine say to each other over the public socket, each message one msgpack frame.

    client   Open | Generate | Cancel | GetStats  ->  engine (one ROUTER socket)
    engine   Welcome | Accepted | TextBlock ... RequestFinished or RequestFailed | StatsReport | Probe
             | Refused | EngineEnded  ->  the client (a DEALER socket) whose request it was

`request_id` is the client's own in both directions: two clients may use the same. News of requests are the
stages' own messages (`pipeline.messages`), so whatever they carry reaches the client. Nothing is pickled, and
what an engine receives is decoded against `ToEngine` or answered with `Refused`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.messages import ChatTurn, Message, RequestFailed, RequestFinished, TextBlock

PROTOCOL_VERSION = 3
LARGEST_MESSAGE_BYTES = 1 << 26
"""Of one frame from a client: far above any prompt. A connection that sends more is closed."""


# --- to the engine ------------------------------------------------------------------------------------


class Open(Message, frozen=True, kw_only=True):
    """The first message of a connection; answered by `Welcome`, or `Refused` for another version."""

    protocol: int


class Generate(Message, frozen=True, kw_only=True):
    """A new request. Exactly one of `prompt` (raw text), `chat` (turns for the template) and
    `prompt_token_ids` is given."""

    request_id: str
    prompt: str | None = None
    chat: list[ChatTurn] | None = None
    prompt_token_ids: list[Any] | None = None
    """What the model reads, as it stands. Of any type here, so that what is no id fails its request alone."""
    options: dict[str, Any]
    """Fields of `Sampling`; those left out are as the engine was started with."""


class Cancel(Message, frozen=True, kw_only=True):
    """End a request: `RequestFinished` comes, or `RequestFailed` if it had not started.

    Unknown ids are ignored.
    """

    request_id: str


class GetStats(Message, frozen=True, kw_only=True):
    """Asks for a `StatsReport`."""

    request_id: str


# --- to a client --------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """The engine is ready for requests."""

    protocol: int
    model: str
    """The folder of the target model."""
    max_requests: int
    """Requests that share each round; others wait their turn."""


class Accepted(Message, frozen=True, kw_only=True):
    """The request was understood and waits for its turn."""

    request_id: str
    seed: int
    """The one given, or the one drawn."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an engine since it is ready."""

    uptime_s: float
    num_clients: int
    """Clients that have requests."""
    num_running: int
    """Requests handed to the stages and not ended."""
    num_waiting: int
    """Requests that wait for their turn."""
    num_finished: int
    """Answered ones, those included that were cancelled on the way."""
    num_failed: int
    num_refused: int
    """Frames that were no message for an engine."""
    num_output_tokens: int
    num_rounds: int
    """Target forwards that committed tokens, summed over requests."""
    num_proposed_tokens: int
    num_accepted_tokens: int
    cache_hits: int
    cache_misses: int
    busy_seconds: dict[str, float]
    """Computing time of each stage, by its name."""


class StatsReport(Message, frozen=True, kw_only=True):
    """The answer to `GetStats`."""

    request_id: str
    stats: EngineStats


class Probe(Message, frozen=True, kw_only=True):
    """Says nothing: that it cannot be delivered tells the engine that the client is gone."""


class Refused(Message, frozen=True, kw_only=True):
    """What the client sent was no message for an engine, or its version is another."""

    reason: str


class EngineEnded(Message, frozen=True, kw_only=True):
    """The engine stops, or a stage was lost; nothing more will come."""

    reason: str


ToEngine = Open | Generate | Cancel | GetStats
ToClient = (
    Welcome
    | Accepted
    | TextBlock
    | RequestFinished
    | RequestFailed
    | StatsReport
    | Probe
    | Refused
    | EngineEnded
)
