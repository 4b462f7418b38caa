"""Turns the prompt rows of a run into requests, a few at a time.

At most `max_requests` are in flight: a request that waited in line inside the engine would show a time to
first token that is not the engine's. A conversation asks its next turn once the previous one is answered.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.messages import ChatTurn, Sampling
from pipeline.prompts import PromptRow

_SEED_BITS = 53
"""Fresh seeds stay exact in every JSON reader, which may read numbers as doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it is submitted."""

    request_id: str
    """The row's index; with the turn after a dot for a conversation, such as `3.0`."""
    text: str
    """What the user says in it."""
    prompt: str | None
    """The raw prompt, or None if `chat` is given."""
    chat: tuple[ChatTurn, ...] | None
    """The conversation up to and with `text`."""
    sampling: Sampling
    row: PromptRow
    turn: int

    @property
    def turn_name(self) -> str | None:
        """Which turn of a conversation this is, for people, who count from 1; None for a prompt."""
        return f"turn {self.turn + 1} of {len(self.row.turns)}" if self.row.is_conversation else None

    @property
    def origin(self) -> str:
        """Where it came from, for error messages: `prompts.jsonl:3` or `prompts.jsonl:3, turn 2 of 4`."""
        return self.row.origin if self.turn_name is None else f"{self.row.origin}, {self.turn_name}"


class RequestQueue:
    """The requests of a run that are still to be submitted, and those in flight."""

    def __init__(self, rows: Sequence[PromptRow], config: RunConfig, *, use_chat: bool) -> None:
        """use_chat: send conversations for the model's chat template, not raw prompts.

        Raises `ConfigError` if a row is a conversation and `use_chat` is off.
        """
        for row in rows:
            if row.is_conversation and not use_chat:
                raise ConfigError(
                    f"{row.origin} has turns, expected a prompt, because the run uses no chat template; "
                    "choose a model that has one and leave out chat=false"
                )
        self._config = config
        self._use_chat = use_chat
        self._waiting = deque(self._first_request(row) for row in rows)
        self.in_flight: dict[str, Request] = {}
        """Submitted requests without an end, by id."""

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return not self._waiting and not self.in_flight

    def take(self) -> Request | None:
        """The next request to submit, or None while there is none or no room for it."""
        if not self._waiting or len(self.in_flight) >= self._config.max_requests:
            return None
        request = self._waiting.popleft()
        self.in_flight[request.request_id] = request
        return request

    def finish(self, request_id: str, answer: str) -> Request:
        """Note the end of a request; the next turn of its conversation comes before new rows."""
        request = self.in_flight.pop(request_id)
        if request.chat is not None and request.turn + 1 < len(request.row.turns):
            history = (*request.chat, ChatTurn(role="assistant", content=answer))
            self._waiting.appendleft(self._request(request.row, request.turn + 1, history))
        return request

    def fail(self, request_id: str) -> list[Request]:
        """Note that a request failed. Returns it and the later turns of its row, which fall with it."""
        request = self.in_flight.pop(request_id)
        later = range(request.turn + 1, len(request.row.turns))
        return [request, *(self._request(request.row, turn, request.chat or ()) for turn in later)]

    def drop_waiting(self) -> None:
        """Forget what was not submitted yet, and the later turns of what was."""
        self._waiting.clear()

    def _first_request(self, row: PromptRow) -> Request:
        return self._request(row, 0, ())

    def _request(self, row: PromptRow, turn: int, history: tuple[ChatTurn, ...]) -> Request:
        text = row.turns[turn]
        return Request(
            request_id=f"{row.index}.{turn}" if row.is_conversation else str(row.index),
            text=text,
            prompt=None if self._use_chat else text,
            chat=(*history, ChatTurn(role="user", content=text)) if self._use_chat else None,
            sampling=self._sampling(),
            row=row,
            turn=turn,
        )

    def _sampling(self) -> Sampling:
        config = self._config
        return Sampling(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            seed=secrets.randbits(_SEED_BITS) if config.seed is None else config.seed,
        )
