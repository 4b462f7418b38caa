"""Draws of the draft under the rejection rule: what they depend on, and what the verifier refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.errors import ProtocolError, StaleTensor
from pipeline.messages import DraftLaws, Proposal, ProposalSource
from pipeline.tensor_pool import PoolSpec, TensorPool, TensorRef, pool_bytes
from stages.draft_speculator.draft_laws import candidates_of, fan_outs_below
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.drawn_tokens import Drawer, DrawnTokens
from stages.target_verifier.rejection import read_laws

LAW = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()


def _drawer(*, seed: int = 3, c: float | None = None) -> Drawer:
    return Drawer(seed, saguaro_c=c, token_ids=None)


def _draws(tree: DraftTree, node: int, *, drawer: Drawer | None = None) -> list[int]:
    (tokens,) = (drawer or _drawer()).next_tokens(tree, [node], LAW, [])
    return [token for token, _ in tokens.ranked(3)]


def test_a_draw_does_not_depend_on_how_many_follow_it() -> None:
    tree = DraftTree([7, 8])
    (tokens,) = _drawer().next_tokens(tree, [tree.root], LAW, [])
    first = tokens.ranked(1)
    assert tokens.ranked(4)[:1] == first
    assert sorted(token for token, _ in tokens.ranked(9)) == [0, 1, 2, 3]


def test_a_context_has_the_same_draws_whether_it_was_predicted_or_committed() -> None:
    ahead = DraftTree([7, 8])
    branch = ahead.add(5, ahead.root)
    leaf = ahead.add(6, branch)
    assert _draws(ahead, leaf) == _draws(DraftTree([7, 8, 5, 6]), 3)


def test_contexts_of_one_position_draw_independently() -> None:
    """Of 2,000 pairs of contexts with equal laws, P(equal first draws) = 0.3: 0.2 to 0.4 is 9 sigma."""
    drawer, equal = _drawer(), 0
    tree = DraftTree([7])
    for token in range(2000):
        nodes = [tree.add(2 * token, tree.root), tree.add(2 * token + 1, tree.root)]
        equal += _draws(tree, nodes[0], drawer=drawer)[0] == _draws(tree, nodes[1], drawer=drawer)[0]
    assert 400 < equal < 800


def test_the_key_follows_the_tree_when_it_forgets_its_prefix() -> None:
    drawer, tree = _drawer(), DraftTree([7, 8])
    drawer.next_tokens(tree, [tree.root], LAW, [])
    tree.is_read = [True, True]
    tree.drop_read_prefix()
    tree.reroot(-1, 5)
    drawer.note_committed(tree)
    tree.is_read[-1] = True
    tree.drop_read_prefix()
    assert _draws(tree, tree.root, drawer=drawer) == _draws(DraftTree([7, 8, 5]), 2)


def test_saguaro_sampling_changes_what_is_drawn_and_not_what_the_predictor_sees() -> None:
    tree = DraftTree([7])
    (tokens,) = _drawer(c=0.0).next_tokens(tree, [0], LAW, [2])
    assert {token for token, _ in tokens.ranked(4)} == {2, 3}
    assert [token for token, _ in candidates_of(tokens, 3)] == [0, 1, 2]
    torch.testing.assert_close(tokens.weights, torch.tensor([0.0, 0.0, 2 / 3, 1 / 3], dtype=torch.float64))


def test_fan_outs_are_counted_from_the_branch_that_a_node_continues() -> None:
    tree = DraftTree([7])
    node = tree.add(1, 0)
    branch = tree.add(2, node)
    below = tree.add(3, branch)
    nodes = [0, node, branch, below]
    assert fan_outs_below(tree, nodes, anchors=[branch], by_depth=[9, 8, 7]) == [9, 8, 9, 8]
    assert fan_outs_below(tree, nodes, anchors=[], by_depth=[9, 8, 7]) == [9, 8, 7, 7]
    assert fan_outs_below(tree, nodes, anchors=[], by_depth=[]) == []


class _Pools:
    """What the speculator would export: laws over the ids 1, 3 and 5."""

    def __init__(self) -> None:
        self._law_pool = self._pool("laws", (2, 3), "float64")
        self._id_pool = self._pool("ids", (3,), "int32")
        self.by_name = {"laws": self._law_pool, "ids": self._id_pool}
        self.ids = self._id_pool.write(np.array([1, 3, 5], dtype=np.int32))

    def _pool(self, name: str, shape: tuple[int, ...], dtype: str) -> TensorPool:
        spec = PoolSpec(name=name, num_slots=1, shape=shape, dtype=dtype)
        return TensorPool(spec, bytearray(pool_bytes(spec)), is_writable=True)

    def write(self) -> TensorRef:
        return self._law_pool.write(np.array([[0.5, 0.5, 0.0]]))


def _proposal(pools: _Pools, *, token: int = 3, rows: list[int] | None = None) -> Proposal:
    return Proposal(
        request_id="r",
        round_id=1,
        committed_len=3,
        token_ids=[token],
        parents=[-1],
        source=ProposalSource.DRAFT,
        ready_length=0,
        draft_spans=[],
        laws=DraftLaws(rows=[0] if rows is None else rows, weights=pools.write(), token_ids=pools.ids),
    )


def test_laws_are_read_over_the_targets_ids() -> None:
    pools = _Pools()
    laws = read_laws(_proposal(pools), pools.by_name, vocab_size=7)
    assert laws is not None
    assert laws.tolist() == [[0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("changes", "vocab_size", "expected"),
    [
        ({"token": 5}, 7, "token 5 was not drawn from row 0"),
        ({"token": 2}, 7, "token 2 was not drawn from row 0"),
        ({"rows": [2]}, 7, "expected a row from -1 to 1"),
        ({"rows": [0, 0]}, 7, "for each of the 1 nodes"),
        ({}, 5, "id 5 is beyond the vocabulary of 5"),
    ],
)
def test_laws_that_cannot_be_those_of_the_proposal_are_refused(
    changes: dict[str, object], vocab_size: int, expected: str
) -> None:
    pools = _Pools()
    proposal = _proposal(pools, **changes)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=expected):
        read_laws(proposal, pools.by_name, vocab_size=vocab_size)


def test_laws_that_were_overwritten_are_stale() -> None:
    pools = _Pools()
    proposal = _proposal(pools)
    pools.write()
    with pytest.raises(StaleTensor):
        read_laws(proposal, pools.by_name, vocab_size=7)


def test_a_pool_that_nobody_exports_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no pool 'laws'"):
        read_laws(_proposal(_Pools()), {}, vocab_size=7)


def test_what_is_not_known_has_no_candidates() -> None:
    assert candidates_of(None, 4) == []
    assert isinstance(_drawer().next_tokens(DraftTree([1]), [0], LAW, [])[0], DrawnTokens)


@pytest.mark.parametrize("c", [None, 0.5])
def test_nothing_is_drawn_where_no_token_is_allowed(c: float | None) -> None:
    tree = DraftTree([1, 2, 3])
    law = torch.full((1, 4), -torch.inf, dtype=torch.float64)
    (drawn,) = _drawer(c=c).next_tokens(tree, [tree.root], law, [] if c is None else [2])
    assert drawn.ranked(3) == []
    assert drawn.candidates(3) == []
