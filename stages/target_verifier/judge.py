"""Which tokens the target chooses: the coupled rule, or the rejection rule, over the rows of a forward.

Knows laws, noise and trees; nothing of messages, KV or rounds.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import msgspec
import torch
from torch import Tensor

from conf.schema import Verification
from kernels.noise import Stream, stream_seed
from kernels.sampling import choose_coupled
from kernels.tree import accept_path, walk_down
from pipeline.messages import Sampling
from stages.target_verifier.rejection import accept_drawn_path
from stages.target_verifier.round_batch import tree_paths
from stages.target_verifier.sequence import Sequence


class Judge:
    """Holds no state of a request: that is in its `Sequence`."""

    def __init__(self, rule: Verification, *, logits_dtype: torch.dtype, max_depth: int) -> None:
        """logits_dtype: of the target's logits. max_depth: levels of a proposal, 0 without a draft."""
        self._is_rejection = rule is Verification.rejection
        self._logits_dtype = logits_dtype
        self._max_depth = max_depth

    def _is_drawn(self, sampling: Sampling) -> bool:
        """Whether the rejection rule judges; at temperature 0 both rules ask for equality."""
        return self._is_rejection and sampling.temperature > 0

    def sampling_of_target(self, sampling: Sampling) -> Sampling:
        """With the seed of the noise that chooses the target's own tokens."""
        if not self._is_drawn(sampling):
            return sampling
        return msgspec.structs.replace(sampling, seed=stream_seed(sampling.seed, Stream.BONUS))

    def acceptance_seed(self, sampling: Sampling) -> int | None:
        """`Sequence.acceptance_seed`."""
        return stream_seed(sampling.seed, Stream.ACCEPTANCE) if self._is_drawn(sampling) else None

    def accept(self, sequence: Sequence, logits: Tensor) -> tuple[list[int], int]:
        """The accepted nodes from the top, and the bonus token. logits: of the root and of every node."""
        position = len(sequence.token_ids)
        if sequence.acceptance_seed is None:
            token_ids, parents = sequence.tree()
            if sequence.law.is_greedy and not sequence.law.reads_paths:
                choices: list[int] = choose_coupled(logits).tolist()
                return accept_path(choices, token_ids, parents)
            return walk_down(
                lambda path: self._choose(
                    sequence,
                    logits[path[-1] + 1 : path[-1] + 2] if path else logits[:1],
                    [token_ids[node] for node in path],
                ),
                token_ids,
                parents,
            )
        return accept_drawn_path(
            sequence.law.log_law(logits, tree_paths(sequence) if sequence.law.reads_paths else ()),
            sequence.proposal,
            sequence.draft_laws,
            position=position,
            acceptance_seed=sequence.acceptance_seed,
            bonus_noise=lambda position: sequence.law.noise(position, logits.dtype),
        )

    def first_token(self, sequence: Sequence, logits: Tensor) -> int:
        """The token after the prompt. logits: [1, V]."""
        return self._choose(sequence, logits, [])

    def _choose(self, sequence: Sequence, logits: Tensor, path: list[int]) -> int:
        """The target's token after the committed ones and `path`. logits: [1, V], of the last of these.

        Worked out node by node, as far as the target accepts: noise and edits of a row cost more than what it
        takes to ask for one at a time.
        """
        position = len(sequence.token_ids) + len(path)
        return int(choose_coupled(sequence.law.perturb(logits, [position], [path])))

    def make_noise_ahead(self, sequences: Rows[Sequence]) -> Sequence | None:
        """Make one row of noise for a coming round, and say whose it is; None where no more is needed."""
        for sequence in sequences:
            start = len(sequence.token_ids)
            for position in range(start, min(start + self._max_depth + 1, sequence.max_len)):
                if not sequence.law.has_noise(position):
                    sequence.law.noise(position, self._logits_dtype)
                    return sequence
        return None
