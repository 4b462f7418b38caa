"""What the target wrote: answers with its likeliest tokens, in safetensors shards that appear whole or not.

Ragged lists are stored flat beside their lengths. A reader that is killed, or a writer, leaves no half file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_HELD_OUT_ONE_IN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the target."""

    key: int
    """Names the prompt; from `prompt_key`."""
    round_index: int
    """How many times the prompts had been gone through."""
    source: str
    temperature: float
    prompt_ids: Tensor
    """int32 [P]."""
    answer_ids: Tensor
    """int32 [A]; the end-of-sequence token included where there is one."""
    top_ids: Tensor
    """int32 [A, k], likeliest first."""
    top_logprobs: Tensor
    """float16 [A, k], of the law at temperature 1."""

    @property
    def is_held_out(self) -> bool:
        """For judging only. Follows from the prompt, so that no answer to it is trained on."""
        return self.key % _HELD_OUT_ONE_IN == 0


def prompt_key(prompt_ids: Sequence[int]) -> int:
    """A 63-bit name of a prompt that does not depend on the order of prompts."""
    digest = hashlib.sha256(",".join(map(str, prompt_ids)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def write_shard(folder: Path, answers: Sequence[Answer]) -> Path:
    """Append one shard to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.stem.split("-")[1]) for path in shard_paths(folder)), default=-1)
    path = folder / f"answers-{number:05d}.safetensors"
    scratch = path.with_suffix(".partial")
    tensors = {
        "keys": torch.tensor([answer.key for answer in answers]),
        "rounds": torch.tensor([answer.round_index for answer in answers], dtype=torch.int32),
        "temperatures": torch.tensor([answer.temperature for answer in answers]),
        "prompt_lengths": torch.tensor([len(answer.prompt_ids) for answer in answers], dtype=torch.int32),
        "answer_lengths": torch.tensor([len(answer.answer_ids) for answer in answers], dtype=torch.int32),
        "prompt_ids": torch.cat([answer.prompt_ids for answer in answers]),
        "answer_ids": torch.cat([answer.answer_ids for answer in answers]),
        "top_ids": torch.cat([answer.top_ids for answer in answers]),
        "top_logprobs": torch.cat([answer.top_logprobs for answer in answers]),
    }
    save_file(tensors, scratch, metadata={"sources": json.dumps([answer.source for answer in answers])})
    os.replace(scratch, path)
    return path


def shard_paths(folder: Path) -> list[Path]:
    """All shards, oldest first."""
    return sorted(folder.glob("answers-*.safetensors"))


def read_answers(folder: Path) -> Iterator[Answer]:
    """All answers of all shards. Their tensors are views of the shards'."""
    for path in shard_paths(folder):
        with safe_open(path, framework="pt") as file:
            sources = json.loads(file.metadata()["sources"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        prompts = tensors["prompt_ids"].split(tensors["prompt_lengths"].tolist())
        lengths = tensors["answer_lengths"].tolist()
        answers, ids, logprobs = (
            tensors[name].split(lengths) for name in ("answer_ids", "top_ids", "top_logprobs")
        )
        for index, source in enumerate(sources):
            yield Answer(
                key=int(tensors["keys"][index]),
                round_index=int(tensors["rounds"][index]),
                source=source,
                temperature=float(tensors["temperatures"][index]),
                prompt_ids=prompts[index],
                answer_ids=answers[index],
                top_ids=ids[index],
                top_logprobs=logprobs[index],
            )


def read_done(folder: Path) -> tuple[set[tuple[int, int]], int]:
    """(key, round) of every answer, and the number of answer tokens; reads little."""
    done: set[tuple[int, int]] = set()
    num_tokens = 0
    for path in shard_paths(folder):
        with safe_open(path, framework="pt") as file:
            keys, rounds = file.get_tensor("keys").tolist(), file.get_tensor("rounds").tolist()
            num_tokens += int(file.get_tensor("answer_lengths").sum())
        done.update(zip(keys, rounds, strict=True))
    return done, num_tokens
