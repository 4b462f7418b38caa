"""What a stage did when: spans of time in a ring of fixed size, recorded while a profile is on.

Owned by one thread. Recording a span packs one record into memory that was allocated when the profile began:
no lock, and nothing grows but the table of request ids, by one entry a request. When the ring is full the
oldest spans are overwritten. While no profile is on, a caller pays one attribute test:

    if spans.is_on:
        spans.add(SpanKind.VERIFY, start_ns, end_ns, request_id=request_id, round_id=round_id)

All times are `time.monotonic_ns()`, which the processes of one host share.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from pipeline.messages import Message, StageName

DEFAULT_NUM_SPANS = 1 << 17
"""Spans a stage keeps; 5 MB. A round of SSD takes some 30 in the busiest stage."""
CLOCK_MARK = "saguaro monotonic_ns "
"""Marks in kernel traces are called so, followed by the time."""
MAX_NUM_SPANS = 1 << 24
"""670 MB."""

_RECORD = struct.Struct("<qqqiiiHBB")
"""start, end, sent (ns); request, round, count; message; kind, peer."""
_pack = _RECORD.pack_into
_STAGES = tuple(StageName)
_NO_PEER = 255


class SpanKind(IntEnum):
    """What a span is about. Those of one stage nest: a handled message may hold a look-up, that a send."""

    RECEIVE = 0
    """Take one message off the inbox and decode it. A message has waited since `sent_ns`."""
    HANDLE = 1
    """`Stage.handle` of one message."""
    SEND = 2
    """Encode one message and queue it."""
    WAIT = 3
    """Nothing to do."""
    WORK = 4
    """One slice of `Stage.work`."""
    PREFILL = 5
    """The target reads a chunk of prompts while no request runs, and chooses the first tokens."""
    VERIFY = 6
    """The target's forward over roots and proposals, and a chunk of prompts beside them if some wait; the
    choice of tokens, and the KV moves."""
    COMMIT = 7
    """Bookkeeping of one request after the forward, when the draft has its outcome."""
    NOISE = 8
    """Noise made ahead while the target waits."""
    READ = 9
    """The draft reads a chunk of a prompt, or of what it missed."""
    DRAFT = 10
    """One draft step of a proposal that the target waits for."""
    GLUE = 11
    """The draft reads what it proposed, to know what may follow."""
    BRANCH = 12
    """One draft step of the prepared outcomes."""
    LOOKUP = 13
    """Find an outcome among the prepared ones. `count`: tokens that were ready, 0 is a miss."""
    PLAN = 14
    """Choose the outcomes to prepare."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded record."""

    kind: SpanKind
    start_ns: int
    end_ns: int
    request_id: str = ""
    """As the stage knows it: between verifier, speculator and predictor with the number of the admission."""
    round_id: int = -1
    """-1: of no round. Of a forward that several requests share, request and round are the first one's."""
    count: int = 0
    """Tokens of a forward or of a look-up, outcomes of a plan."""
    message: str = ""
    """Type of the message that was received, handled or sent."""
    peer: StageName | None = None
    """The other end of a message."""
    sent_ns: int = 0
    """When the message was sent: with sender and receiver this names it."""


class SpanDump(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a recorder holds, as it travels to whoever asked for it."""

    records: bytes
    """Oldest first."""
    num_overwritten: int
    """Spans that the ring had no room for."""
    request_ids: list[str]
    messages: list[str]
    start_ns: int
    """When the recorder was turned on."""
    end_ns: int
    """When this was taken."""

    def spans(self) -> Iterator[Span]:
        """The records, in the order in which the spans ended."""
        for start, end, sent, request, round_id, count, message, kind, peer in _RECORD.iter_unpack(
            self.records
        ):
            yield Span(
                kind=SpanKind(kind),
                start_ns=start,
                end_ns=end,
                request_id=self.request_ids[request],
                round_id=round_id,
                count=count,
                message=self.messages[message],
                peer=None if peer == _NO_PEER else _STAGES[peer],
                sent_ns=sent,
            )


class SpanRecorder:
    """The ring of one thread; off, and without memory, until `start`.

    is_on: to be looked at before anything is recorded.
    """

    __slots__ = ("_buffer", "_messages", "_num_added", "_num_spans", "_request_ids", "_start_ns", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        self._clear(num_spans=0, now_ns=0)

    def _clear(self, *, num_spans: int, now_ns: int) -> None:
        self._num_spans = num_spans
        self._buffer = bytearray(num_spans * _RECORD.size)
        self._num_added = 0
        self._start_ns = now_ns
        self._request_ids: dict[str, int] = {"": 0}
        self._messages: dict[type[Message], int] = {}

    def start(self, *, num_spans: int, now_ns: int) -> None:
        """Forget what was recorded, and record from now on. num_spans: size of the ring, at least 1."""
        if num_spans < 1:
            raise ValueError(f"expected room for at least 1 span, got {num_spans}")
        self._clear(num_spans=num_spans, now_ns=now_ns)
        self.is_on = True

    def stop(self) -> None:
        """Record nothing more, and give the memory back."""
        self.is_on = False
        self._clear(num_spans=0, now_ns=0)

    def add(
        self,
        kind: SpanKind,
        start_ns: int,
        end_ns: int,
        *,
        request_id: str = "",
        round_id: int = -1,
        count: int = 0,
    ) -> None:
        """Record one span. Only while `is_on`."""
        request = self._request(request_id)
        offset = (self._num_added % self._num_spans) * _RECORD.size
        _pack(self._buffer, offset, start_ns, end_ns, 0, request, round_id, count, 0, kind, _NO_PEER)
        self._num_added += 1

    def add_message(
        self, kind: SpanKind, start_ns: int, end_ns: int, *, message: Message, peer: StageName, sent_ns: int
    ) -> None:
        """Record what was done with one message, of this run or another's. Only while `is_on`."""
        kind_of_message = type(message)
        number = self._messages.get(kind_of_message)
        if number is None:
            number = self._messages[kind_of_message] = 1 + len(self._messages)
        request = self._request(getattr(message, "request_id", ""))
        round_id = getattr(message, "round_id", -1)
        offset = (self._num_added % self._num_spans) * _RECORD.size
        _pack(
            self._buffer,
            offset,
            start_ns,
            end_ns,
            sent_ns,
            request,
            round_id,
            0,
            number,
            kind,
            _STAGES.index(peer),  # faster than a dict: the hash of an enum's member is computed in Python
        )
        self._num_added += 1

    def dump(self, *, now_ns: int) -> SpanDump:
        """What the ring holds."""
        size, used = _RECORD.size, min(self._num_added, self._num_spans)
        split = (self._num_added % self._num_spans) * size if self._num_added > used else used * size
        view = memoryview(self._buffer)
        return SpanDump(
            records=b"".join((view[split : used * size], view[:split])),
            num_overwritten=self._num_added - used,
            request_ids=list(self._request_ids),
            messages=["", *(message.__name__ for message in self._messages)],
            start_ns=self._start_ns,
            end_ns=now_ns,
        )

    def _request(self, request_id: str) -> int:
        number = self._request_ids.get(request_id)
        if number is None:
            number = self._request_ids[request_id] = len(self._request_ids)
        return number
