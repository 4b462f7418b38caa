"""The pools in which the draft's likeliest tokens travel to the predictor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.stage import PoolExporter
from pipeline.tensor_pool import PoolSpec
from pipeline.tensor_ref import TensorRef

_SLOTS_PER_REQUEST = 4
"""Tensors a request may have under way: the predictor is at most a round behind."""


class CandidatePools:
    """Owns the ids and the log-probabilities."""

    def __init__(self, pools: PoolExporter, *, max_rows: int, width: int, num_requests: int) -> None:
        """max_rows: nodes of a proposal, and the root. width: most tokens of each."""
        self.width = width
        num_slots, shape = _SLOTS_PER_REQUEST * num_requests, (max_rows, width)
        self._ids = pools.export(
            PoolSpec(name="candidate_ids", num_slots=num_slots, shape=shape, dtype="int32")
        )
        self._log_probs = pools.export(
            PoolSpec(name="candidate_log_probs", num_slots=num_slots, shape=shape, dtype="float32")
        )

    def write(self, rows: Sequence[Sequence[tuple[int, float]]]) -> tuple[TensorRef, TensorRef]:
        """Ids and log-probabilities of what may follow each node, best first, padded with -1 and -inf."""
        ids = np.full((len(rows), self.width), -1, dtype=np.int32)
        log_probs = np.full(ids.shape, -np.inf, dtype=np.float32)
        for row, following in enumerate(rows):
            if following:
                ids[row, : len(following)], log_probs[row, : len(following)] = zip(*following, strict=True)
        return self._ids.write(ids), self._log_probs.write(log_probs)
