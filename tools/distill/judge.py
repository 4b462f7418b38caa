"""The step `judge`: what the draft would be accepted for, on prompts that it was not trained on.

Greedy: from random positions of greedy answers the draft rolls out a chain; a token counts if all before it
were right too, so that the figures are those of a verification at temperature 0. Coupled at temperature 1:
target and draft choose with the same Gumbel noise, one token ahead of a written text; the target's law is
known by its likeliest tokens only, and a chain is not rolled out, because its law is not known off the text.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.noise import gumbel_noise
from kernels.quantise import quantise_rows
from pipeline.errors import ConfigError
from tools.distill.batches import padded
from tools.distill.draft_network import HEAD_NAME, DraftNetwork, initial_tensors
from tools.distill.head_vocabulary import read_vocabulary
from tools.distill.settings import DistillSettings, StoredDType
from tools.distill.shards import Answer, read_answers
from tools.distill.trainer import CHECKPOINT
from tools.progress import say

_BATCH_POSITIONS = 8192


@dataclass(slots=True)
class Figures:
    """Of one run of `judge`."""

    rates: list[float]
    """Greedy: share of chains that are right up to each depth."""
    conditional: list[float]
    """Greedy: share right at each depth, of those that were right before."""
    lengths: list[float]
    """Acceptance length at K = 1, 2, ...: with the bonus token."""
    by_source: dict[str, list[float]]
    """Number of positions, rate at depth 1, acceptance length at the greatest depth."""
    coupled: float | None
    """Share of positions where target and draft choose alike at temperature 1; None without any."""
    predicted: dict[str, list[float]]
    """tokens/s by K, if `target_ms` and `step_ms` were given."""


def judge(settings: DistillSettings, target_folder: Path, work: Path) -> None:
    """Print the table and write `work/judge.json`. Raises `ConfigError`."""
    draft = Draft.load(settings, target_folder, work)
    held_out = [answer for answer in read_answers(work / "answers") if answer.is_held_out]
    if not held_out:
        raise ConfigError(f"{work} holds no held-out answers; write more (steps=[write])")
    starts = _draw_starts(held_out, settings)
    right = greedy_chains(draft, starts, settings.depth)
    coupled = coupled_agreement(draft, _draw_positions(held_out, settings))
    figures = summarise(settings, starts, right, coupled)
    _print(settings, figures, len(starts))
    scratch = work / "judge.partial"
    scratch.write_text(json.dumps({f: getattr(figures, f) for f in Figures.__slots__}, indent=2) + "\n")
    os.replace(scratch, work / "judge.json")


class Draft:
    """The averaged weights, rounded as they are stored."""

    def __init__(self, network: DraftNetwork, tensors: dict[str, Tensor], head_token_ids: Tensor) -> None:
        self._network, self._tensors = network, tensors
        self.head_token_ids = head_token_ids

    @classmethod
    def load(cls, settings: DistillSettings, target_folder: Path, work: Path) -> Draft:
        """From the checkpoint; raises `ConfigError` if there is none."""
        layers, weights = trained_weights(work)
        head_token_ids = read_vocabulary(work)
        shape, _, embed = initial_tensors(target_folder, layers, head_token_ids)
        dtype = torch.bfloat16 if shape.hidden_size >= 128 else torch.float32
        positions = settings.max_prompt_tokens + settings.max_answer_tokens + settings.depth + 16
        network = DraftNetwork(shape, embed, num_positions=positions, dtype=dtype)
        tensors = {name: as_stored(tensor, settings.dtype).to(dtype) for name, tensor in weights.items()}
        return cls(network, tensors, head_token_ids)

    @torch.inference_mode()
    def next_logits(self, contexts: list[list[int]]) -> Tensor:
        """float32 [len(contexts), R] behind the last token of each context."""
        order = sorted(range(len(contexts)), key=lambda index: len(contexts[index]))
        found: list[Tensor] = [torch.empty(0)] * len(contexts)
        start = 0
        while start < len(order):
            end = start + 1
            while (
                end < len(order) and (end + 1 - start) * padded(len(contexts[order[end]])) <= _BATCH_POSITIONS
            ):
                end += 1
            part = order[start:end]
            longest = padded(len(contexts[part[-1]]))
            token_ids = torch.zeros(len(part), longest, dtype=torch.int64)
            for row, index in enumerate(part):
                token_ids[row, : len(contexts[index])] = torch.tensor(contexts[index])
            rows = torch.tensor([row * longest + len(contexts[i]) - 1 for row, i in enumerate(part)])
            hidden = self._network.hidden(self._tensors, token_ids, rows)
            logits = torch.mm(hidden, self._tensors[HEAD_NAME].t()).float()
            for row, index in enumerate(part):
                found[index] = logits[row]
            start = end
        return torch.stack(found)


def trained_weights(work: Path) -> tuple[list[int], dict[str, Tensor]]:
    """Layers and averaged weights of the checkpoint. Raises `ConfigError`."""
    path = work / CHECKPOINT
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; run steps=[train] first")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return saved["layers"], saved["averages"]


def as_stored(tensor: Tensor, dtype: StoredDType) -> Tensor:
    """float32 values after a trip through the stored format."""
    if dtype is StoredDType.int8:
        if tensor.dim() != 2:
            return tensor
        values, scale = quantise_rows(tensor)
        return values.float() * scale[:, None]
    return tensor.to(getattr(torch, dtype.value)).float()


def greedy_chains(draft: Draft, starts: list[tuple[Answer, int]], depth: int) -> list[int]:
    """For each (answer, position): how many tokens of the greedy chain are the answer's."""
    right = [0] * len(starts)
    alive = list(range(len(starts)))
    contexts = [[*a.prompt_ids.tolist(), *a.answer_ids[:p].tolist()] for a, p in starts]
    for step in range(depth):
        if not alive:
            break
        best = draft.head_token_ids[draft.next_logits([contexts[i] for i in alive]).argmax(dim=1)].tolist()
        still = []
        for index, token in zip(alive, best, strict=True):
            answer, position = starts[index]
            if token == int(answer.answer_ids[position + step]):
                right[index] += 1
                contexts[index].append(token)
                still.append(index)
        alive = still
    return right


def coupled_agreement(draft: Draft, positions: list[tuple[Answer, int]]) -> float | None:
    """Share of positions where both arg-max of (log law + noise) are the same id."""
    if not positions:
        return None
    logits = draft.next_logits([[*a.prompt_ids.tolist(), *a.answer_ids[:p].tolist()] for a, p in positions])
    num_right = 0
    for index, (answer, place) in enumerate(positions):
        position = len(answer.prompt_ids) + place
        noise = gumbel_noise(index, position, draft.head_token_ids)
        ours = int(draft.head_token_ids[(logits[index].double() + noise).argmax()])
        ids = answer.top_ids[place].long()
        theirs = answer.top_logprobs[place].double() + gumbel_noise(index, position, ids)
        num_right += int(ids[theirs.argmax()]) == ours
    return num_right / len(positions)


def summarise(
    settings: DistillSettings, starts: list[tuple[Answer, int]], right: list[int], coupled: float | None
) -> Figures:
    """Rates and lengths from the chains."""
    depths = range(1, settings.depth + 1)
    rates = [sum(count >= depth for count in right) / len(right) for depth in depths]
    before = [1.0, *rates[:-1]]
    lengths = [1 + sum(rates[:depth]) for depth in depths]
    chains: dict[str, list[int]] = defaultdict(list)
    for (answer, _), count in zip(starts, right, strict=True):
        chains[answer.source.split("/")[0] if not answer.source.startswith("own") else answer.source].append(
            count
        )
    by_source = {
        source: [len(counts), sum(c > 0 for c in counts) / len(counts), 1 + sum(counts) / len(counts)]
        for source, counts in sorted(chains.items())
    }
    predicted: dict[str, list[float]] = {}
    if settings.target_ms and settings.step_ms:
        target, step = settings.target_ms, settings.step_ms
        predicted["linear"] = [1000 * n / (target + k * step) for k, n in zip(depths, lengths, strict=True)]
        predicted["all outcomes prepared"] = [1000 * length / target for length in lengths]
        predicted["plain"] = [1000 / target for _ in lengths]
    return Figures(
        rates=rates,
        conditional=[a / b if b else 0.0 for a, b in zip(rates, before, strict=True)],
        lengths=lengths,
        by_source=by_source,
        coupled=coupled,
        predicted=predicted,
    )


def _draw_starts(answers: list[Answer], settings: DistillSettings) -> list[tuple[Answer, int]]:
    """Random positions of greedy answers with `depth` tokens behind them."""
    draw = random.Random(f"judge {settings.seed}")
    places = [
        (answer, place)
        for answer in answers
        if answer.temperature == 0.0
        for place in range(len(answer.answer_ids) - settings.depth + 1)
    ]
    if not places:
        raise ConfigError(f"no held-out greedy answer has depth={settings.depth} tokens; write more")
    return draw.sample(places, min(settings.judge_positions, len(places)))


def _draw_positions(answers: list[Answer], settings: DistillSettings) -> list[tuple[Answer, int]]:
    """Random positions of answers written at temperature 0.7 or more."""
    draw = random.Random(f"coupled {settings.seed}")
    places = [(a, place) for a in answers if a.temperature >= 0.7 for place in range(len(a.answer_ids))]
    return draw.sample(places, min(settings.judge_positions, len(places)))


def _print(settings: DistillSettings, figures: Figures, num_starts: int) -> None:
    say(f"greedy, held-out prompts, {num_starts} positions, weights as stored ({settings.dtype.value})")
    say("   K  right up to K  right if before  length (with bonus)")
    for index in range(settings.depth):
        say(
            f"  {index + 1:2}  {figures.rates[index]:13.3f}  {figures.conditional[index]:15.3f}  "
            f"{figures.lengths[index]:19.3f}"
        )
    for source, (count, rate, length) in figures.by_source.items():
        say(f"  {source}: {count:.0f} positions, first token {rate:.3f}, length {length:.2f}")
    coupled = "no positions" if figures.coupled is None else f"{figures.coupled:.3f}"
    say(f"coupled at temperature 1, one token ahead, target's law by its top tokens: {coupled}")
    for system, speeds in figures.predicted.items():
        say(f"predicted tokens/s by K, {system}: " + " ".join(f"{speed:.1f}" for speed in speeds))
