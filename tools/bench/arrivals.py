"""When an answer's tokens came: every system notes it in the same way."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.messages import RequestMetrics
from tools.bench.protocol import Answer

_DIGITS = 6
"""Of times in seconds."""


class Arrivals:
    """The blocks of one answer, noted as they arrive."""

    def __init__(self, began: float) -> None:
        """began: `time.monotonic()` when its batch was asked."""
        self._began = began
        self._times_s: list[float] = []
        self._counts: list[int] = []
        self.token_ids: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Blocks so far."""
        return len(self._counts)

    def add(self, token_ids: Sequence[int]) -> None:
        """A block arrives now; an empty one is none."""
        if token_ids:
            self._times_s.append(round(time.monotonic() - self._began, _DIGITS))
            self._counts.append(len(token_ids))
            self.token_ids.extend(token_ids)

    def answer(
        self, *, num_prompt_tokens: int, num_rounds: int | None, metrics: RequestMetrics | None = None
    ) -> Answer:
        """The answer, now complete."""
        return Answer(
            token_ids=self.token_ids,
            num_prompt_tokens=num_prompt_tokens,
            block_times_s=self._times_s,
            block_tokens=self._counts,
            num_rounds=num_rounds,
            metrics=metrics,
        )
