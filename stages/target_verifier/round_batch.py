"""Packs what the target forwards: a prompt, or the root and the proposal of every active request."""

from __future__ import annotations

import torch

from kernels.tree import ancestor_rows
from stages.model.batch import ForwardBatch, SequenceRows
from stages.target_verifier.sequence import Sequence


def prefill_batch(sequence: Sequence) -> ForwardBatch:
    """All tokens that are not in the cache, in one pass; logits of the last one."""
    start, end = sequence.num_prefilled, len(sequence.token_ids)
    slots = list(range(start, end))
    rows = SequenceRows(kv=sequence.kv, prefix_len=start, write_slots=slots, tail_len=end - start, mask=None)
    return ForwardBatch(
        token_ids=sequence.token_ids[start:],
        positions=slots,
        sequences=[rows],
        logit_rows=[end - start - 1],
    )


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


def round_batch(sequences: list[Sequence]) -> ForwardBatch:
    """Pack root and tree of every sequence into one forward."""
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[SequenceRows] = []
    for sequence in sequences:
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
    return ForwardBatch(token_ids=token_ids, positions=positions, sequences=rows, logit_rows=None)
