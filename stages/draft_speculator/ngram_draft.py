"""Prompt look-up: what followed the last few tokens where they stood before, in prompt or output.

Costs next to nothing, needs no weights, and is good where text repeats itself: summaries, code edits,
lists. Source: the n-gram matching of "prompt lookup decoding", with counts kept for every continuation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.noise import gumbel_noise
from pipeline.messages import BeginDraft, Sampling
from stages.draft_speculator.draft_source import DraftSource, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree, Rerooting
from stages.grammar import GrammarCompiler, GrammarState, begin_grammar

MAX_NGRAM = 4
_MIN_NGRAM = 1


class Continuations:
    """`NextTokens` over a ranked list."""

    __slots__ = ("_ranked",)

    def __init__(self, ids: list[int], scores: list[float]) -> None:
        """ids, scores (log q + g): best first; may be empty, where the context never stood before."""
        total = math.log(sum(math.exp(score - scores[0]) for score in scores)) + scores[0] if scores else 0.0
        self._ranked = [(token, score - total) for token, score in zip(ids, scores, strict=True)]

    def ranked(self, count: int) -> list[tuple[int, float]]:
        """Best first."""
        return self._ranked[:count]


class LookedUp(NamedTuple):
    """A token of a chain that was looked up."""

    token_id: int
    matched: int
    """Tokens before it that stood before the same token earlier, up to `MAX_NGRAM`."""


class NgramIndex:
    """Continuations of every n-gram in the committed tokens of one request."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}
        """n-gram -> follower -> count; dicts keep the order in which followers were last seen."""
        self._num_indexed = 0

    @property
    def token_ids(self) -> Sequence[int]:
        """Committed tokens."""
        return self._tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """More committed tokens. Indexed by `catch_up`, or when something is looked up."""
        self._tokens += token_ids

    def catch_up(self) -> None:
        """Index what was appended."""
        for end in range(self._num_indexed, len(self._tokens)):
            token, before = self._tokens[end], tuple(self._tokens[max(end - MAX_NGRAM, 0) : end])
            for start in range(len(before)):
                followers = self._followers.setdefault(before[start:], {})
                followers[token] = followers.pop(token, 0) + 1
        self._num_indexed = len(self._tokens)

    def tail(self, count: int) -> list[int]:
        """The last `count` committed tokens."""
        return self._tokens[-count:] if count else []

    def followers(self, context: Sequence[int]) -> dict[int, int]:
        """Counts of what followed the longest suffix of `context` that stood before; empty if none did.

        Later entries were seen more recently.
        """
        return self._match(context)[0]

    def _match(self, context: Sequence[int]) -> tuple[dict[int, int], int]:
        """`followers`, and the length of the suffix."""
        self.catch_up()
        for size in range(min(MAX_NGRAM, len(context)), _MIN_NGRAM - 1, -1):
            found = self._followers.get(tuple(context[-size:]))
            if found is not None:
                return found, size
        return {}, 0

    def chain(self, count: int) -> list[LookedUp]:
        """Up to `count` tokens: at each step the most frequent follower, the latest seen of several."""
        context, found = self.tail(MAX_NGRAM), list[LookedUp]()
        while len(found) < count:
            followers, size = self._match(context)
            if not followers:
                break
            token = max(reversed(followers), key=followers.__getitem__)
            found.append(LookedUp(token, size))
            context = [*context, token][-MAX_NGRAM:]
        return found


class _NgramRequest:
    def __init__(self, sampling: Sampling, *, num_prompt_tokens: int, grammar: GrammarState | None) -> None:
        self.sampling = sampling
        self.index = NgramIndex()
        self.grammar = grammar
        self._num_prompt_tokens = num_prompt_tokens

    def commit(self, tree: DraftTree) -> None:
        """Take in the committed tokens that are new."""
        num_known = len(self.index.token_ids)
        new = tree.token_ids[tree.root + 1 - (tree.committed_len - num_known) : tree.root + 1]
        self.index.append(new)
        if self.grammar is not None:
            self.grammar.commit(new[max(self._num_prompt_tokens - num_known, 0) :])


class NgramDraft(DraftSource):
    """Ranks continuations by count, then by how recently they were seen; under noise, as a law of counts."""

    def __init__(self, *, is_coupled: bool = True, grammars: GrammarCompiler | None = None) -> None:
        """is_coupled: whether the target's noise has a say, which is of use only if the target has it too.

        grammars: as in `ModelDraft`.
        """
        self._is_coupled = is_coupled
        self._grammars = grammars
        self._requests: dict[str, _NgramRequest] = {}

    def begin(self, request: BeginDraft, *, max_nodes: int) -> int:
        """Start an empty index; the prompt is indexed at the first step."""
        self._requests[request.request_id] = _NgramRequest(
            request.sampling,
            num_prompt_tokens=len(request.prompt_token_ids),
            grammar=begin_grammar(self._grammars, request.sampling, eos_token_ids=request.eos_token_ids),
        )
        return 0

    def extend(self, jobs: Sequence[ExtendJob]) -> None:
        """Look every node up."""
        for job in jobs:
            request = self._requests[job.request_id]
            request.commit(job.tree)
            for node in job.nodes:
                job.tree.is_read[node] = True
                if node >= job.tree.root:
                    job.tree.next_tokens[node] = self._continuations(request, job.tree, node)

    def _continuations(self, request: _NgramRequest, tree: DraftTree, node: int) -> Continuations:
        context = [*request.index.tail(MAX_NGRAM), *tree.path(node)][-MAX_NGRAM:]
        counts = request.index.followers(context)
        if request.grammar is not None and (mask := request.grammar.mask(tree.path(node))) is not None:
            counts = {token: count for token, count in counts.items() if token < len(mask) and mask[token]}
        ids = list(reversed(counts))  # most recent first: the sort below is stable
        total = sum(counts.values())
        scores = [math.log(counts[token] / total) for token in ids]
        if self._is_coupled and request.sampling.temperature > 0 and ids:
            noise = gumbel_noise(request.sampling.seed, tree.positions[node] + 1, torch.tensor(ids)).tolist()
            scores = [score + g for score, g in zip(scores, noise, strict=True)]
        order = sorted(range(len(ids)), key=lambda i: -scores[i])
        return Continuations([ids[i] for i in order], [scores[i] for i in order])

    def reroot(self, request_id: str, rerooting: Rerooting, tree: DraftTree) -> None:
        """Index what was committed, before the tree forgets it."""
        self._requests[request_id].commit(tree)

    def end(self, request_id: str) -> None:
        """Forget the index."""
        self._requests.pop(request_id, None)
