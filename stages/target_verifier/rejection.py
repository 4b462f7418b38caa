"""The walk down a proposal under the rejection rule: which nodes are accepted, and the bonus token.

The proposal's law must be the one that its tokens were drawn from: `read_laws` refuses what cannot be one.
The three kinds of noise are streams of their own (`kernels.noise.Stream`), so no draw of the draft can tell
anything about a draw of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernels.noise import uniform
from kernels.rejection import choose_child, laws_in_turn, point_mass
from pipeline.errors import ProtocolError
from pipeline.messages import Proposal
from pipeline.tensor_pool import TensorPool


def read_laws(proposal: Proposal, pools: Mapping[str, TensorPool], *, vocab_size: int) -> Tensor | None:
    """The proposal's laws, [laws, V] float64 over the target's ids; None if it has none.

    Raises `ProtocolError` where they do not fit the proposal, also a `StaleTensor`.
    """
    laws = proposal.laws
    if laws is None:
        return None
    what = f"laws of the proposal for request {proposal.request_id}"
    pool, id_pool = pools.get(laws.weights.pool), pools.get(laws.token_ids.pool)
    if pool is None or id_pool is None:
        raise ProtocolError(f"{what}: no pool {laws.weights.pool!r}, or no pool {laws.token_ids.pool!r}")
    if len(laws.rows) != len(proposal.token_ids) or not all(
        -1 <= row < pool.spec.shape[0] for row in laws.rows
    ):
        raise ProtocolError(
            f"{what}: expected a row from -1 to {pool.spec.shape[0] - 1} for each of the "
            f"{len(proposal.token_ids)} nodes, got {laws.rows}"
        )
    weights = torch.from_numpy(pool.read(laws.weights, rows=max(laws.rows, default=-1) + 1)).double()
    token_ids = torch.from_numpy(id_pool.read(laws.token_ids)).long()
    if int(token_ids.max()) >= vocab_size:
        raise ProtocolError(f"{what}: id {int(token_ids.max())} is beyond the vocabulary of {vocab_size}")
    dense = torch.zeros(len(weights), vocab_size, dtype=torch.float64).index_copy_(1, token_ids, weights)
    for token, row in zip(proposal.token_ids, laws.rows, strict=True):
        if row >= 0 and not dense[row, token] > 0:
            raise ProtocolError(f"{what}: token {token} was not drawn from row {row}, where it has no weight")
    return dense


def accept_drawn_path(
    log_law: Tensor,
    proposal: Proposal | None,
    draft_laws: Tensor | None,
    *,
    position: int,
    acceptance_seed: int,
    bonus_noise: Callable[[int], Tensor],
) -> tuple[list[int], int]:
    """Walk down the tree while a child is accepted.

    log_law: [1 + nodes, V], the target's after the root and each node. draft_laws: as `read_laws` has them.
    position: of the root's children. bonus_noise: Gumbel noise [V] of a position, for the bonus token.
    Returns the accepted nodes from the top, and the bonus token.
    """
    parents = [] if proposal is None else proposal.parents
    accepted: list[int] = []
    node = -1
    while True:
        target_probs = log_law[node + 1].double().softmax(dim=-1)[None]
        children = [child for child, parent in enumerate(parents) if parent == node]
        choice = -1
        if proposal is not None and children:
            tokens = torch.tensor([[proposal.token_ids[child] for child in children]])
            uniforms = [uniform(acceptance_seed, position, token) for token in tokens[0].tolist()]
            choices, target_probs = choose_child(
                target_probs,
                _laws_of(children, proposal, draft_laws, vocab_size=log_law.shape[-1]),
                tokens,
                torch.tensor([uniforms], dtype=torch.float64),
            )
            choice = int(choices)
        if choice < 0:
            return accepted, int((target_probs[0].log() + bonus_noise(position)).argmax())
        node = children[choice]
        accepted.append(node)
        position += 1


def _laws_of(
    children: Sequence[int], proposal: Proposal, draft_laws: Tensor | None, *, vocab_size: int
) -> list[Tensor]:
    """What each of the siblings was drawn from, given those before it: [1, V] each."""
    rows = (
        [-1] * len(children) if proposal.laws is None else [proposal.laws.rows[child] for child in children]
    )
    laws = [point_mass(torch.tensor([proposal.token_ids[child]]), vocab_size) for child in children]
    for row in sorted(set(rows) - {-1}):
        assert draft_laws is not None, "a proposal with laws was read with them"
        drawn = [index for index, other in enumerate(rows) if other == row]
        tokens = torch.tensor([[proposal.token_ids[children[index]] for index in drawn]])
        for index, law in zip(drawn, laws_in_turn(draft_laws[row][None], tokens), strict=True):
            laws[index] = law
    return laws
