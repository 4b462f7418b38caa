"""Packs what the target forwards: root and proposal of every running request, and chunks of prompts."""

from __future__ import annotations

import torch

from kernels.tree import ancestor_rows
from stages.model.batch import ForwardBatch, SequenceRows
from stages.target_verifier.schedule import Step
from stages.target_verifier.sequence import Sequence


def tree_positions(sequence: Sequence) -> list[int]:
    """Absolute positions of the root and of the nodes of the proposal."""
    root = len(sequence.token_ids) - 1
    positions = [root]
    for parent in sequence.tree()[1]:
        positions.append(positions[parent + 1] + 1)
    return positions


def tree_paths(sequence: Sequence) -> list[list[int]]:
    """For the root and every node of the proposal the tokens from below the root down to it."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(*sequence.tree(), strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def pack(step: Step) -> ForwardBatch:
    """One forward: root and tree of every running request, then the chunks of prompts.

    Logits: of all rows of the former, and of the last row of each prompt that is read to its end.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[SequenceRows] = []
    for sequence in step.rounds:
        tree_tokens, parents = sequence.tree()
        root_slot = len(sequence.token_ids) - 1
        num_rows = 1 + len(tree_tokens)
        is_chain = all(parent == node - 1 for node, parent in enumerate(parents))
        token_ids += [sequence.token_ids[-1], *tree_tokens]
        positions += tree_positions(sequence)
        rows.append(
            SequenceRows(
                kv=sequence.kv,
                prefix_len=root_slot,
                write_slots=list(range(root_slot, root_slot + num_rows)),
                tail_len=num_rows,
                mask=None if is_chain else torch.tensor(ancestor_rows(parents)),
            )
        )
    logit_rows = list(range(len(token_ids)))
    for chunk in step.chunks:
        slots = list(range(chunk.start, chunk.end))
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        positions += slots
        rows.append(
            SequenceRows(
                kv=chunk.sequence.kv,
                prefix_len=chunk.start,
                write_slots=slots,
                tail_len=len(slots),
                mask=None,
            )
        )
        if chunk.is_last:
            logit_rows.append(len(token_ids) - 1)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        sequences=rows,
        logit_rows=logit_rows if step.chunks else None,
    )
