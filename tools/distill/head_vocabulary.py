"""The step `vocabulary`: which of the target's ids the draft's head has rows for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from stages.model.shape import read_shape
from stages.vocabulary import load_tokenizer
from tools.distill.settings import DistillSettings
from tools.distill.shards import read_answers
from tools.progress import say

_FILE = "vocabulary.json"


def choose_vocabulary(settings: DistillSettings, target_folder: Path, work: Path) -> None:
    """Write `work/vocabulary.json`: special tokens, then the ids that the answers use most.

    Once chosen it stays, because checkpoints have a row for each id; delete the file to choose again.
    Raises `ConfigError` if nothing is written yet.
    """
    vocab_size = read_shape(target_folder).vocab_size
    counts, held_out = count_ids(work, vocab_size)
    path = work / _FILE
    if path.is_file():
        ids = read_vocabulary(work)
        say(f"{path.name} is there already, with {len(ids):,} ids")
    else:
        specials = set(read_shape(target_folder).eos_token_ids)
        added = load_tokenizer(target_folder).get_added_tokens_decoder()
        specials |= {token_id for token_id, token in added.items() if token.special}
        size = min(settings.head_size, vocab_size)
        # A little more than nothing for what was likely and not chosen; ties go to the lower id.
        order = torch.argsort(counts, descending=True, stable=True).tolist()
        chosen = list(dict.fromkeys([*sorted(i for i in specials if i < vocab_size), *order]))[:size]
        ids = torch.tensor(sorted(chosen))
        scratch = path.with_suffix(".partial")
        scratch.write_text(json.dumps(ids.tolist()), encoding="utf-8")
        os.replace(scratch, path)
    for what, count in (("written", counts), ("held-out", held_out)):
        share = float(count[ids].sum() / count.sum().clamp(min=1))
        say(f"{len(ids):,} of {vocab_size:,} ids cover {share:.2%} of what the target has {what}")


def read_vocabulary(work: Path) -> Tensor:
    """int64 [R], ascending. Raises `ConfigError` if it is not chosen yet."""
    path = work / _FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; run steps=[vocabulary] first")
    return torch.tensor(json.loads(path.read_text(encoding="utf-8")))


def count_ids(work: Path, vocab_size: int) -> tuple[Tensor, Tensor]:
    """How often each id stands in the answers: to train on, held out. float64 [V] each.

    The likeliest tokens that were not chosen count by their probability: the draft should have rows for
    them too.
    """
    counts = torch.zeros(2, vocab_size, dtype=torch.float64)
    for answer in read_answers(work / "answers"):
        row = counts[int(answer.is_held_out)]
        ids = answer.answer_ids.long()
        row.index_add_(0, ids, torch.ones(len(ids), dtype=torch.float64))
        if not answer.is_held_out:
            mass = answer.top_logprobs.double().exp_().flatten() * 0.1
            row.index_add_(0, answer.top_ids.long().flatten(), mass)
    if not counts.any():
        raise ConfigError(f"{work} holds no answers; run steps=[write] first")
    return counts[0], counts[1]
