"""A folder with a tiny random model and a tokenizer, for real stage processes, and its plain reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from pipeline.messages import Sampling
from stages.model.shape import parse_shape
from stages.model.weights import load_model
from stages.vocabulary import load_tokenizer
from tests.plain_options import plain_answer
from tests.tiny import EOS, PlainDecoder
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_level
from tests.unit.test_draft_folder import named_tensors

_VOCAB_SIZE = 416
"""Those of the tokenizer, and some rows of padding."""


@dataclass(frozen=True)
class TinyFolder:
    """A model folder, and what plain decoding of its model in float64 says."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    @cached_property
    def _decoder(self) -> PlainDecoder:
        return PlainDecoder(load_model(str(self.folder), dtype=torch.float64))

    def expected(self, prompt: str, sampling: Sampling) -> list[int]:
        """Output tokens after a raw prompt."""
        return self.expected_after(self.tokenizer.encode(prompt).ids, sampling)

    def expected_after(self, token_ids: list[int], sampling: Sampling) -> list[int]:
        """Output tokens after a prompt of token ids."""
        return self._decoder.generate(token_ids, sampling)

    def answer(self, prompt: str, sampling: Sampling) -> tuple[list[int], str]:
        """Output tokens after a raw prompt, and the text of the answer, with every option but grammars."""
        raw = Sampling(max_tokens=1, seed=0)
        plain = plain_answer(
            lambda tokens: self._decoder.law(tokens, raw)[0],
            self.tokenizer.encode(prompt).ids,
            sampling,
            eos=EOS,
            decode=self._decode,
        )
        is_cut = plain.finish_reason == "stop"
        if isinstance(plain.stop_reason, str):
            whole = self._decode(plain.token_ids)
            text = whole[: whole.rindex(plain.stop_reason)]
        else:
            text = self._decode(plain.token_ids[:-1] if is_cut else plain.token_ids)
        return plain.token_ids, prompt + text if sampling.echo else text

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def text(self, token_ids: list[int]) -> str:
        """One-shot text of output tokens; one that ends the sequence has none."""
        kept = token_ids[:-1] if token_ids[-1] == EOS else token_ids
        text: str = self.tokenizer.decode(kept, skip_special_tokens=True)
        return text


def save_tiny_folder(folder: Path, *, seed: int = 1) -> TinyFolder:
    """Two layers, hidden size 64, with a chat template."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    byte_level().save(str(folder / "tokenizer.json"))
    tensors = named_tensors(parse_shape(config, {}, origin="test"), seed=seed)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return TinyFolder(folder)
