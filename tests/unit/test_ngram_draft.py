"""Prompt look-up."""

from __future__ import annotations

import math

import pytest

from pipeline.messages import BeginDraft, Sampling
from stages.draft_speculator.draft_source import ExtendJob
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.ngram_draft import NgramDraft, NgramIndex


def test_the_longest_context_that_stood_before_decides() -> None:
    index = NgramIndex()
    index.append([1, 2, 3, 9, 2, 3, 4, 1, 2, 3])
    assert index.followers([1, 2, 3]) == {9: 1}
    assert index.followers([8, 2, 3]) == {9: 1, 4: 1}
    assert index.followers([77]) == {}


def test_counts_come_before_recency_and_recency_breaks_ties() -> None:
    draft, tree = _begin([5, 1, 5, 2, 5, 1, 5, 2, 5, 1, 5, 3, 5])
    node = tree.root
    draft.extend([ExtendJob(request_id="r", tree=tree, nodes=tree.unread_committed())])
    next_tokens = tree.next_tokens[node]
    assert next_tokens is not None
    # After "3 5" nothing is known, after "5" 1 came three times, 2 twice, 3 once.
    ranked = next_tokens.ranked(9)
    assert [token for token, _ in ranked] == [1, 2, 3]
    assert [math.exp(log_prob) for _, log_prob in ranked] == pytest.approx([3 / 6, 2 / 6, 1 / 6])


def test_a_chain_of_followers_ends_where_nothing_followed() -> None:
    index = NgramIndex()
    index.append([1, 2, 3, 9, 1, 2])
    assert index.chain(2) == [(3, 2), (9, 3)], "tokens, and how many before each matched"
    assert [token for token, _ in index.chain(9)[:4]] == [3, 9, 1, 2]
    assert NgramIndex().chain(3) == []
    index.append([7])
    assert index.chain(3) == []


def test_a_context_that_never_stood_before_has_no_continuation() -> None:
    draft, tree = _begin([1, 2, 3])
    draft.extend([ExtendJob(request_id="r", tree=tree, nodes=tree.unread_committed())])
    next_tokens = tree.next_tokens[tree.root]
    assert next_tokens is not None
    assert next_tokens.ranked(3) == []


def test_look_up_sees_drafted_tokens_and_what_was_committed_since() -> None:
    draft, tree = _begin([1, 2, 3, 4, 1])
    draft.extend([ExtendJob(request_id="r", tree=tree, nodes=tree.unread_committed())])
    tree.drop_read_prefix()
    drafted = tree.add(2, tree.root)
    draft.extend([ExtendJob(request_id="r", tree=tree, nodes=[drafted])])
    after = tree.next_tokens[drafted]
    assert after is not None
    assert after.ranked(1)[0][0] == 3
    tree.submit([drafted])
    draft.reroot("r", tree.reroot(0, 8), tree)
    tree.drop_read_prefix()
    draft.extend([ExtendJob(request_id="r", tree=tree, nodes=tree.unread_committed())])
    known = draft._requests["r"].index
    assert known.tail(7) == [1, 2, 3, 4, 1, 2, 8][-7:]
    assert known.followers([1, 2]) == {3: 1, 8: 1}


def _begin(prompt: list[int]) -> tuple[NgramDraft, DraftTree]:
    draft = NgramDraft()
    request = BeginDraft(
        request_id="r", prompt_token_ids=prompt, sampling=Sampling(max_tokens=9, seed=1), max_len=99
    )
    draft.begin(request, max_nodes=9)
    return draft, DraftTree(prompt)
