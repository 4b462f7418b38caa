"""Notices a draft that does not fit its target: nothing it proposes is ever accepted.

Such a run is exact but slow, and without a word nobody finds out why.
"""

from __future__ import annotations

from conf.schema import DraftConfig
from pipeline.log import get_logger

_log = get_logger(__name__)

_MIN_PROPOSED = 256
_LOW_RATE = 0.01


class DraftWatch:
    """Warns once, naming the draft, when a first long stretch of proposals is all but never accepted."""

    def __init__(self, draft: DraftConfig) -> None:
        self._draft = draft
        self._num_proposed = 0
        self._num_accepted = 0
        self._has_judged = False

    def add(self, *, num_proposed: int, num_accepted: int) -> None:
        """Count one round."""
        self._num_proposed += num_proposed
        self._num_accepted += num_accepted
        if self._has_judged or self._num_proposed < _MIN_PROPOSED:
            return
        self._has_judged = True
        if self._num_accepted < _LOW_RATE * self._num_proposed:
            _log.warning(
                "the draft (%s) fits badly: %d of its first %d proposed tokens were accepted, so it only "
                "costs time; check speculation.draft, or run conf=autoregressive",
                self._describe(),
                self._num_accepted,
                self._num_proposed,
            )

    def _describe(self) -> str:
        draft = self._draft
        detail = draft.path or (f"layers: {draft.layers}" if draft.layers else "")
        return f"{draft.kind.value} {detail}".strip()
