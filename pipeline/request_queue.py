"""Turns the prompt rows of a run into requests, a few at a time.

At most `max_requests` are in flight: a request that waited in line inside the engine would show a time to
first token that is not the engine's. A conversation asks its next turn once the previous one is answered.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from conf.schema import RunConfig
from pipeline.errors import ConfigError, RequestError
from pipeline.messages import ChatTurn, Sampling
from pipeline.prompts import PromptRow
from pipeline.samples import sample_id, sample_seed
from pipeline.sampling_options import sampling_of, with_options

_SEED_BITS = 53
"""Fresh seeds stay exact in every JSON reader, which may read numbers as doubles."""
_MOST_IDS_IN_TITLE = 100
"""More than a line shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it is submitted."""

    request_id: str
    """The row's index; with the turn after a dot for a conversation, such as `3.0`, and the sample after a
    slash where there are several, such as `3/1`."""
    text: str | None
    """What the user says in it; None where token ids are given."""
    prompt: str | None
    """The raw prompt, or None if something else is given."""
    chat: tuple[ChatTurn, ...] | None
    """The conversation up to and with `text`."""
    prompt_token_ids: tuple[int, ...] | None
    """What the model reads, where the row has that: no template comes over it."""
    sampling: Sampling
    row: PromptRow
    turn: int
    sample: int
    """Which of the samples of its row it is, from 0; each sample of a conversation goes on by itself."""

    @property
    def title(self) -> str:
        """What an answer may be headed by."""
        if self.text is None:
            return f"token ids {', '.join(map(str, (self.prompt_token_ids or ())[:_MOST_IDS_IN_TITLE]))}"
        return self.text

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
        """use_chat: send texts as conversations for the model's chat template, not as raw prompts.

        Raises `ConfigError` if a row is a conversation and `use_chat` is off, and for options of a row that
        are not supported.
        """
        for row in rows:
            if row.is_conversation and not use_chat:
                raise ConfigError(
                    f"{row.origin} has turns, expected a prompt, because the run uses no chat template; "
                    "choose a model that has one and leave out chat=false"
                )
        self._config = config
        self._use_chat = use_chat
        self._waiting = deque(request for row in rows for request in self._first_requests(row))
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
            self._waiting.appendleft(self._next_turn(request, request.turn + 1, history))
        return request

    def fail(self, request_id: str) -> list[Request]:
        """Note that a request failed. Returns it and the later turns of its row, which fall with it."""
        request = self.in_flight.pop(request_id)
        later = range(request.turn + 1, len(request.row.turns))
        return [request, *(self._next_turn(request, turn, request.chat or ()) for turn in later)]

    def drop_waiting(self) -> None:
        """Forget what was not submitted yet, and the later turns of what was."""
        self._waiting.clear()

    def _first_requests(self, row: PromptRow) -> list[Request]:
        sampling = self._sampling(row)
        return [self._request(row, 0, (), sampling, sample) for sample in range(self._config.n)]

    def _next_turn(self, request: Request, turn: int, history: tuple[ChatTurn, ...]) -> Request:
        return self._request(request.row, turn, history, self._sampling(request.row), request.sample)

    def _request(
        self, row: PromptRow, turn: int, history: tuple[ChatTurn, ...], sampling: Sampling, sample: int
    ) -> Request:
        """sampling: that of sample 0."""
        text = row.turns[turn] if row.token_ids is None else None
        said = ChatTurn(role="user", content=text) if self._use_chat and text is not None else None
        request_id = f"{row.index}.{turn}" if row.is_conversation else str(row.index)
        return Request(
            request_id=sample_id(request_id, sample, num_samples=self._config.n),
            text=text,
            prompt=None if self._use_chat else text,
            chat=None if said is None else (*history, said),
            prompt_token_ids=row.token_ids,
            sampling=msgspec.structs.replace(sampling, seed=sample_seed(sampling.seed, sample)),
            row=row,
            turn=turn,
            sample=sample,
        )

    def _sampling(self, row: PromptRow) -> Sampling:
        """The run's options with those of the row; a seed is drawn where neither gives one."""
        seed = self._config.seed
        sampling = sampling_of(self._config, seed=secrets.randbits(_SEED_BITS) if seed is None else seed)
        try:
            return with_options(sampling, row.options)
        except RequestError as error:
            raise ConfigError(f"{row.origin}: {error}") from None
