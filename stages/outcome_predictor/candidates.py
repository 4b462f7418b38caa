"""What the speculator said of one round: which tokens may follow the root and every proposed node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.tree import check_tree
from pipeline.errors import ProtocolError
from pipeline.messages import Candidates
from pipeline.tensor_pool import TensorPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundCandidates:
    """Row 0 is the root, row i + 1 is node i. Columns are candidates, best first."""

    round_id: int
    token_ids: list[int]
    parents: list[int]
    is_filler: bool
    """Whether no draft stands behind the proposal."""
    ids: NDArray[np.int32]
    """[rows, width]; -1 where there is no candidate."""
    log_probs: NDArray[np.float64]
    """[rows, width]; -inf where there is no candidate."""
    is_child: NDArray[np.bool_]
    """[rows, width]: candidates that were proposed, which can be no bonus token."""
    columns: list[int]
    """Of each node in the row of its parent; -1 if the draft did not name it there."""

    @classmethod
    def of(
        cls,
        *,
        round_id: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        ids: NDArray[np.int32],
        log_probs: NDArray[np.float32],
        is_filler: bool = False,
    ) -> RoundCandidates:
        """Find the proposed tokens among the candidates."""
        is_child = np.zeros(ids.shape, dtype=np.bool_)
        columns: list[int] = []
        if len(token_ids):
            rows = np.asarray(parents) + 1
            matches = ids[rows] == np.asarray(token_ids)[:, None]
            found, at = matches.any(axis=1), matches.argmax(axis=1)
            is_child[rows[found], at[found]] = True
            columns = np.where(found, at, -1).tolist()
        return cls(
            round_id=round_id,
            token_ids=list(token_ids),
            parents=list(parents),
            is_filler=is_filler,
            ids=ids,
            log_probs=log_probs.astype(np.float64),
            is_child=is_child,
            columns=columns,
        )

    def bonuses(self) -> list[list[int]]:
        """Possible bonus tokens of each row, best first."""
        may_be_bonus = (self.ids >= 0) & ~self.is_child
        return [row[mask].tolist() for row, mask in zip(self.ids, may_be_bonus, strict=True)]

    def column_of(self, row: int, token_id: int) -> int | None:
        """Where a token stands in a row; None if the draft did not name it."""
        (found,) = np.nonzero(self.ids[row] == token_id)
        return int(found[0]) if len(found) else None

    def rank_of(self, row: int, bonus_token: int) -> int | None:
        """Place of a bonus token among the possible ones of its row, from 1; None if it was not named."""
        column = self.column_of(row, bonus_token)
        return None if column is None else column + 1 - int(self.is_child[row, :column].sum())


def read_candidates(message: Candidates, pools: Mapping[str, TensorPool]) -> RoundCandidates:
    """What the message says and points to.

    Raises `ProtocolError`, or `StaleTensor` if it is too late: the round is over then.
    """
    fault = check_tree(message.token_ids, message.parents, vocab_size=1 << 31)
    refs = (message.candidate_ids, message.candidate_log_probs)
    found = [pools.get(ref.pool) for ref in refs]
    if fault is None and None in found:
        fault = f"there is no pool {refs[found.index(None)].pool!r}"
    if fault is not None:
        raise ProtocolError(f"candidates for request {message.request_id}: {fault}")
    num_rows = len(message.token_ids) + 1
    ids, log_probs = (
        pool.read(ref, rows=num_rows) for pool, ref in zip(found, refs, strict=True) if pool is not None
    )
    return RoundCandidates.of(
        round_id=message.round_id,
        token_ids=message.token_ids,
        parents=message.parents,
        ids=ids,
        log_probs=log_probs,
        is_filler=message.is_filler,
    )
