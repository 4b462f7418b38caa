"""One request's sampling law and noise, as target and draft both apply them to rows of logits.

Owns a small cache of noise rows: noise depends on the position alone, so all rows of one position share
it, and it can be made before the logits are there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kernels.noise import gumbel_noise
from kernels.sampling import sampling_law
from pipeline.messages import Sampling
from stages.grammar import GrammarState
from stages.model.grammar_mask import GrammarMask
from stages.model.logit_edits import LogitEdits, Path, has_edits


class TokenLaw:
    """Perturbed logits of one request: the target chooses their arg-max, the draft proposes their top."""

    def __init__(
        self,
        sampling: Sampling,
        vocab_ids: Tensor,
        *,
        prompt_token_ids: Sequence[int] = (),
        eos_token_ids: Collection[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        """vocab_ids: [V] int64 ascending, the target's id of each logit column.

        eos_token_ids: what `Sampling.min_tokens` bans beside the request's own stop tokens.
        grammar: of `Sampling.structured_outputs`, before any output.
        """
        self._sampling = sampling
        self._vocab_ids = vocab_ids
        self._num_committed = len(prompt_token_ids)
        self._edits = (
            LogitEdits(sampling, vocab_ids, prompt_token_ids=prompt_token_ids, eos_token_ids=eos_token_ids)
            if has_edits(sampling)
            else None
        )
        self._grammar = None if grammar is None else GrammarMask(grammar, vocab_ids)
        self._noise_by_position: dict[int, Tensor] = {}

    @property
    def is_greedy(self) -> bool:
        """Temperature 0: no noise, no filters."""
        return self._sampling.temperature == 0.0

    @property
    def reads_paths(self) -> bool:
        """Whether a row's law depends on the tokens before it: else `paths` may be left out below."""
        return self._edits is not None or self._grammar is not None

    @property
    def num_committed(self) -> int:
        """Tokens that the law counts as committed: the prompt, and what `commit` was told."""
        return self._num_committed

    def commit(self, token_ids: Sequence[int]) -> None:
        """More output tokens can no longer change."""
        self._num_committed += len(token_ids)
        if self._edits is not None:
            self._edits.commit(token_ids)
        if self._grammar is not None:
            self._grammar.state.commit(token_ids)

    def fault_of_end(self, path: Path) -> str | None:
        """Why an end-of-sequence token after this path does not complete a structured output, or None."""
        return None if self._grammar is None else self._grammar.state.fault(path)

    def noise(self, position: int, dtype: torch.dtype) -> Tensor:
        """Noise [V] for choosing the token at absolute `position`."""
        row = self._noise_by_position.get(position)
        if row is None:
            row = gumbel_noise(self._sampling.seed, position, self._vocab_ids).to(dtype)
            self._noise_by_position[position] = row
        return row

    def has_noise(self, position: int) -> bool:
        """Whether the noise of `position` is ready, or not needed."""
        return self.is_greedy or position in self._noise_by_position

    def forget_before(self, position: int) -> None:
        """Drop noise of positions that are committed."""
        for old in [p for p in self._noise_by_position if p < position]:
            del self._noise_by_position[old]

    def log_law(self, logits: Tensor, paths: Sequence[Path] = ()) -> Tensor:
        """The final law of each row: all options applied, no noise.

        logits: [T, V] float32 or float64; not changed.
        paths:  for each row the tokens between the committed ones and the token that the row chooses.
        Returns [T, V] unnormalised log-probabilities, -inf for excluded tokens. At temperature 0 only the
        order of a row means something; without edits its logits come back as they are.
        """
        edited = logits if self._edits is None else self._edits.apply(logits, paths)
        if self._grammar is not None:
            edited = self._grammar.apply(edited, logits, paths)
        sampling = self._sampling
        return sampling_law(
            edited,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )

    def perturb(self, logits: Tensor, positions: Sequence[int], paths: Sequence[Path] = ()) -> Tensor:
        """Log law plus noise.

        logits, paths: see `log_law`.
        positions: for each row the absolute position of the token that the row chooses.
        Returns [T, V]; -inf for excluded tokens. Greedy rows have no noise.
        """
        law = self.log_law(logits, paths)
        if self.is_greedy:
            return law
        for row, position in zip(law, positions, strict=True):
            row.add_(self.noise(position, law.dtype))
        return law
