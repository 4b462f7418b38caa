"""The plain loop with every request option, on transformers' logits processors: no code of the law is ours.

Frequency and presence penalties have no processor there and follow vLLM's definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.noise import gumbel_noise
from pipeline.messages import Sampling

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Tokens -> logits [V] of the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAnswer:
    """What plain decoding returns."""

    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None


def edited_logits(
    logits: torch.Tensor, *, prompt: Sequence[int], output: Sequence[int], sampling: Sampling, eos: int
) -> torch.Tensor:
    """Logits [V] after bans, bias and penalties, before temperature."""
    processors = LogitsProcessorList()
    if sampling.min_tokens:
        banned = [eos, *sampling.stop_token_ids]
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_tokens, banned, "cpu"))
    if sampling.logit_bias:
        bias = {(token,): value for token, value in sampling.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores = processors(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]
    for token, count in Counter(output).items():
        scores[token] -= sampling.frequency_penalty * count
        scores[token] -= sampling.presence_penalty
    return scores


def final_law(
    logits: torch.Tensor,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    eos: int,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log law [V] up to a constant: temperature and filters applied as well.

    allowed: [V] bool, by a grammar; it wins over bans that leave nothing of it.
    """
    scores = edited_logits(logits, prompt=prompt, output=output, sampling=sampling, eos=eos)
    if allowed is not None:
        if not bool((scores[allowed] > -torch.inf).any()):
            scores = logits
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sampling.temperature == 0:
        return scores
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(torch.tensor([[*prompt, *output]]), scores[None])[0]


def plain_answer(
    logits: Logits,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    eos: int,
    decode: Callable[[list[int]], str] | None = None,
    allowed: Callable[[Sequence[int]], torch.Tensor] | None = None,
) -> PlainAnswer:
    """One token after the other. decode: ids to text, where there are stop strings.

    allowed: from output to the tokens that may follow, [V] bool.
    """
    output: list[int] = []
    num_free = 0
    """Characters in which no stop string may end: those of the first `min_tokens` tokens."""
    while True:
        tokens = [*prompt, *output]
        law = final_law(
            logits(tokens),
            prompt=prompt,
            output=output,
            sampling=sampling,
            eos=eos,
            allowed=None if allowed is None else allowed(output),
        )
        if sampling.temperature > 0:
            noise = gumbel_noise(sampling.seed, len(tokens), torch.arange(len(law)))
            law = law + noise.to(law.dtype)
        output.append(int(law.argmax()))
        if output[-1] == eos and not sampling.ignore_eos:
            return PlainAnswer(token_ids=output, finish_reason="stop")
        if output[-1] in sampling.stop_token_ids:
            return PlainAnswer(token_ids=output, finish_reason="stop", stop_reason=output[-1])
        if sampling.stop and decode is not None:
            text = decode(output)
            if len(output) <= sampling.min_tokens:
                num_free = len(text)
            else:
                for stop in sampling.stop:
                    if text.find(stop, max(num_free - len(stop) + 1, 0)) >= 0:
                        return PlainAnswer(token_ids=output, finish_reason="stop", stop_reason=stop)
        if len(output) == sampling.max_tokens:
            return PlainAnswer(token_ids=output, finish_reason="length")
