"""The peer transformers: `generate` alone, with prompt look-up, or with a draft as its assistant.

Eager attention and a KV cache, as a user gets them by naming nothing else; the same ids in, the same number
format and token budget. Sampling keeps every token, as ours does by default, but draws noise of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from stages.model.shape import read_shape
from tools.bench.arrivals import Arrivals
from tools.bench.assisted_draft import load_assistant
from tools.bench.identity import short_path
from tools.bench.protocol import Answer, Batch, PeerSpec, Question


class RoundClock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens come: `generate` puts the prompt first, then every round's tokens."""

    def __init__(self) -> None:
        self.arrivals = Arrivals(time.monotonic())
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if self._has_prompt:
            self.arrivals.add(value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        pass


class TransformersPeer:
    """A loaded model, and how its `generate` is called."""

    def __init__(self, spec: PeerSpec) -> None:
        """Load the target, and its assistant if any. Raises `ConfigError` for a draft that does not fit."""
        torch.set_num_threads(len(spec.cores))
        dtype = getattr(torch, spec.dtype.value)
        folder = Path(spec.folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        ).eval()
        eos = list(read_shape(folder).eos_token_ids)
        # A checkpoint's own generation settings may penalise or filter tokens, which ours does not.
        self._model.generation_config = transformers.GenerationConfig(
            eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, use_cache=True
        )
        self._extra: dict[str, Any] = {}
        self.given = (
            f"transformers {transformers.__version__}, torch {torch.__version__}, {spec.dtype.value}, eager "
            f"attention, KV cache, {spec.threads}"
        )
        if spec.name == "transformers_lookup":
            self._extra["prompt_lookup_num_tokens"] = spec.lookup_tokens
            self.given += f"; prompt look-up of {spec.lookup_tokens} tokens"
        elif spec.name == "transformers_assisted":
            assert spec.draft is not None, "the bench refuses the entry without one"
            assistant = load_assistant(
                Path(spec.draft), folder, self._model, dtype=dtype, num_tokens=spec.assistant_tokens
            )
            self._extra["assistant_model"] = assistant
            number = spec.assistant_tokens or "as many as transformers does by default"
            self.given += f"; assistant {short_path(spec.draft)}, tokens a round: {number}"

    def answer(self, batch: Batch) -> list[Answer]:
        """Answer one question after the other."""
        return [self._answer(question, batch.temperature) for question in batch.questions]

    def _answer(self, question: Question, temperature: float) -> Answer:
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(question.seed)  # generate takes no generator
        clock = RoundClock()
        prompt = torch.tensor([question.prompt_token_ids])
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=question.max_tokens,
            streamer=clock,
            **sampling,
            **self._extra,
        )
        return clock.arrivals.answer(num_prompt_tokens=prompt.shape[1], num_rounds=clock.arrivals.num_blocks)


@contextmanager
def open_system(spec: PeerSpec) -> Iterator[TransformersPeer]:
    """Load the peer."""
    transformers.logging.set_verbosity_error()
    yield TransformersPeer(spec)
