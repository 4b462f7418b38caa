"""The line of requests that hold no KV: new ones, and before them those that were pre-empted.

Decides who is admitted next, first come, first served: nobody overtakes a request that waits for pages. Takes
the pages from the ledger. Knows nothing about messages, rounds and proposals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pipeline.messages import TokenizedRequest
from stages.model.pages import KVHandle
from stages.target_verifier.page_ledger import PageLedger
from stages.target_verifier.sequence import Sequence

NewSequence = Callable[[TokenizedRequest, KVHandle], Sequence | None]
"""Makes what the verifier keeps of a request that is admitted for the first time; None if it fails."""


class Admission:
    """Who waits, and the counter of admissions."""

    def __init__(
        self, ledger: PageLedger, *, max_requests: int, max_context: int, new_sequence: NewSequence
    ) -> None:
        self._ledger = ledger
        self._max_requests = max_requests
        self._max_context = max_context
        self._new_sequence = new_sequence
        self._line: deque[TokenizedRequest | Sequence] = deque()
        """Those that were pre-empted, the oldest first, then the new ones as they came."""
        self._num_admissions = 0
        self._num_arrivals = 0

    @property
    def preempted(self) -> list[str]:
        """Ids of the requests that were pre-empted, in line."""
        return [waiting.request_id for waiting in self._line if isinstance(waiting, Sequence)]

    @property
    def next_length(self) -> int | None:
        """Tokens of the first in line; None if nobody waits."""
        if not self._line:
            return None
        first = self._line[0]
        return len(first.token_ids if isinstance(first, Sequence) else first.prompt_token_ids)

    def __contains__(self, request_id: str) -> bool:
        return any(request.request_id == request_id for request in self._line)

    def add(self, request: TokenizedRequest) -> None:
        """A new request, last in line."""
        self._line.append(request)

    def put_back(self, sequence: Sequence) -> None:
        """A request that gave its pages up, first in line; it is younger than any that still holds some."""
        self._line.appendleft(sequence)

    def withdraw(self, request_id: str) -> TokenizedRequest | Sequence | None:
        """Take a request out of the line; None if it is not in it."""
        for place, found in enumerate(self._line):
            if found.request_id == request_id:
                del self._line[place]
                self._ledger.ask_again()
                return found
        return None

    def next(self, *, num_active: int) -> Sequence | None:
        """Admit the first in line, with pages for its tokens and a round; None if it has to wait."""
        if num_active >= self._max_requests or not self._ledger.is_ready:
            return None
        sequence: Sequence | None = None
        while sequence is None and self._line:
            first = self._line[0]
            if isinstance(first, Sequence):
                token_ids, max_len = first.token_ids, first.max_len
            else:
                token_ids = first.prompt_token_ids
                max_len = min(len(token_ids) + first.sampling.max_tokens, self._max_context)
            draft_id = f"{first.request_id}#{self._num_admissions + 1}"
            kv = self._ledger.open(draft_id, token_ids, max_len=max_len, num_active=num_active)
            if kv is None:
                return None
            self._line.popleft()
            if isinstance(first, Sequence):
                sequence = first
            else:
                sequence = self._new_sequence(first, kv)
                if sequence is None:
                    self._ledger.cancel(draft_id, kv)
                    continue
                self._num_arrivals += 1
                sequence.arrival = self._num_arrivals
            self._num_admissions += 1
            sequence.begin(draft_id, kv)
        return sequence
