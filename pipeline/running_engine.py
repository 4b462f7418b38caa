"""What the frontends (command line, server, `LLM`) need of `pipeline.engine.Engine`. Tests have their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import zmq

from conf.schema import RunConfig
from pipeline.messages import ChatTurn, FrontendMessage, Sampling, StageName
from pipeline.report import BusyTime


class RunningEngine(Protocol):
    """A started engine."""

    def submit(
        self,
        *,
        request_id: str,
        prompt: str | None,
        chat: list[ChatTurn] | None,
        prompt_token_ids: list[int] | None = None,
        sampling: Sampling,
        submitted_ns: int | None = None,
    ) -> None:
        """Send a request on its way."""

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request."""

    def events(self, timeout_s: float) -> Sequence[FrontendMessage]:
        """News of the requests, waiting up to `timeout_s` for the first."""

    def wake_on(self, socket: zmq.Socket[bytes]) -> None:
        """Let `events` return early when something waits on `socket`."""

    def stats(self, timeout_s: float = 1.0) -> Mapping[StageName, BusyTime]:
        """Figures of each stage."""


OpenEngine = Callable[[RunConfig], AbstractContextManager[RunningEngine]]
