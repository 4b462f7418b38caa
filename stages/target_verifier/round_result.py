"""Computes a step, and what it gives each request: the tokens of its block, before stop rules cut it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pipeline.messages import Outcome
from stages.model.runner import Runner
from stages.target_verifier.judge import Judge
from stages.target_verifier.round_batch import pack
from stages.target_verifier.schedule import Step
from stages.target_verifier.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """Of a round, or of a prompt that was read to its end."""

    sequence: Sequence
    block: list[int]
    """The tokens of the accepted nodes and the bonus token."""
    accepted: list[int]
    """The accepted nodes from the top."""
    logits: Tensor
    """[1 + nodes, V], as the model gave them, of the root and every proposed node."""

    @property
    def num_proposed(self) -> int:
        """Nodes that were verified."""
        return len(self.sequence.tree()[0])

    def outcome(
        self, *, decided_ns: int, num_rows: int, compute_ns: int, num_following: int, ends_rest: bool
    ) -> Outcome:
        """What the draft side is told, once the block is committed. See `Outcome` for the arguments."""
        return Outcome(
            request_id=self.sequence.draft_id,
            round_id=self.sequence.round_id,
            committed_len=len(self.sequence.token_ids),
            accepted_node=self.accepted[-1] if self.accepted else -1,
            bonus_token=self.block[-1],
            num_accepted=len(self.accepted),
            num_proposed=self.num_proposed,
            num_rows=num_rows,
            compute_ns=compute_ns,
            decided_ns=decided_ns,
            num_following=num_following,
            ends_rest=ends_rest,
        )


def compute(step: Step, runner: Runner, judge: Judge) -> list[RoundResult]:
    """Forward the step, choose, and bring the KV of what was accepted into place.

    Returns a result for every request that gets tokens.
    """
    logits = runner.forward(pack(step))
    results: list[RoundResult] = []
    row = 0
    for sequence in step.rounds:
        token_ids, _ = sequence.tree()
        rows = logits[row : row + 1 + len(token_ids)]
        row += len(rows)
        accepted, bonus = judge.accept(sequence, rows)
        _move_accepted_kv(sequence, accepted, runner)
        block = [*(token_ids[node] for node in accepted), bonus]
        results.append(RoundResult(sequence=sequence, block=block, accepted=accepted, logits=rows))
    for chunk in step.chunks:
        sequence = chunk.sequence
        sequence.num_prefilled = chunk.end
        runner.kv.keep(sequence.kv, sequence.token_ids[: chunk.end])
        if chunk.is_last:
            rows = logits[row : row + 1]
            row += 1
            token = judge.first_token(sequence, rows)
            results.append(RoundResult(sequence=sequence, block=[token], accepted=[], logits=rows))
    return results


def _move_accepted_kv(sequence: Sequence, accepted: list[int], runner: Runner) -> None:
    """Bring the KV of the accepted path behind the root's; a chain already lies there."""
    first_node_slot = len(sequence.token_ids)
    src = [first_node_slot + node for node in accepted]
    dst = list(range(first_node_slot, first_node_slot + len(accepted)))
    if src != dst:
        runner.kv.move(sequence.kv, src, dst)
