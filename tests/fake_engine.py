"""An engine without stages, for tests of the command line: its prompts say what shall happen.

`say WORDS` answers with the words, one block each; `fail REASON` fails; `hang` starts an answer and waits
for its cancellation, `deaf` does so even then; `die` loses a stage, and `shutdown` does
so because everything here was sent SIGTERM. Token ids are answered with themselves. Run as a module, this
file is the command line with that engine.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq

from conf.schema import RunConfig
from pipeline.errors import EngineDead
from pipeline.given_prompt import check_prompt
from pipeline.messages import (
    ChatTurn,
    FinishReason,
    FrontendMessage,
    RequestFailed,
    Sampling,
    StageName,
    TextBlock,
)
from pipeline.run import main
from tests.fake_frontend_events import finished


@dataclass
class FakeStats:
    busy_ns: int


class FakeEngine:
    """Answers like the real one; remembers what it was asked."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.submitted: list[str] = []
        self.chats: dict[str, list[ChatTurn] | None] = {}
        self.samplings: dict[str, Sampling] = {}
        self.is_stopped = False
        self.most_in_flight = 0
        self.cancelled: list[str] = []
        self.prompts: dict[str, str | None] = {}
        self.token_ids: dict[str, list[int] | None] = {}
        self._poller = zmq.Poller()
        self._news: deque[FrontendMessage] = deque()
        self._in_flight: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_stopped = True
        print("engine stopped", file=sys.stderr, flush=True)

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
        check_prompt(prompt=prompt, chat=chat, prompt_token_ids=prompt_token_ids)
        self.submitted.append(request_id)
        self.chats[request_id] = chat
        self.prompts[request_id] = prompt
        self.token_ids[request_id] = prompt_token_ids
        self.samplings[request_id] = sampling
        text = prompt if prompt is not None else chat[-1].content if chat else ""
        if prompt_token_ids is not None:
            text = f"say {' '.join(map(str, prompt_token_ids))}"
        verb, _, rest = text.partition(" ")
        self._in_flight[request_id] = verb
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        if verb in ("hang", "deaf"):
            self._block(request_id, "partial", 0)
        elif verb == "fail":
            del self._in_flight[request_id]
            self._news.append(RequestFailed(request_id=request_id, reason=rest))
        else:
            for number, word in enumerate(rest.split(" ")):
                self._block(request_id, word if number == 0 else " " + word, number)
            read = prompt_token_ids or (1, 2, 3, 4, 5)
            self._news.append(finished(request_id, rest, prompt_token_ids=read))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if self._in_flight.get(request_id) == "hang":
            reason = FinishReason.CANCELLED
            self._news.append(finished(request_id, "partial", finish_reason=reason, num_output_tokens=1))

    def events(self, timeout_s: float) -> Sequence[FrontendMessage]:
        if "die" in self._in_flight.values():
            raise EngineDead("stage lost: target-verifier (pid 1) was killed by SIGKILL")
        if "shutdown" in self._in_flight.values():
            os.kill(os.getpid(), signal.SIGTERM)
            raise EngineDead("stage lost: target-verifier (pid 1) was ended by SIGTERM")
        if not self._news:
            # As the real one waits for mail.
            if self._poller.sockets:
                self._poller.poll(1000 * timeout_s)
            else:
                time.sleep(timeout_s)
            return []
        event = self._news.popleft()
        if not isinstance(event, TextBlock):
            self._in_flight.pop(event.request_id, None)
        return [event]

    def wake_on(self, socket: zmq.Socket[bytes]) -> None:
        self._poller.register(socket, zmq.POLLIN)

    def stats(self, timeout_s: float = 1.0) -> dict[StageName, FakeStats]:
        return {StageName.VERIFIER: FakeStats(11_000_000)}

    def _block(self, request_id: str, text: str, number: int) -> None:
        self._news.append(TextBlock(request_id=request_id, text=text, token_ids=[number], source=None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], open_engine=FakeEngine))
