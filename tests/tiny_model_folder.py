"""A tiny random model on disk, with a tokenizer, for runs in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from stages.model.shape import read_shape
from stages.model.weights import expected_tensors
from tests.tiny_tokenizers import byte_level, save_model_folder

VOCAB_SIZE = 512
"""The tokenizer knows fewer."""
NO_EOS = VOCAB_SIZE - 1
"""What a random model does not say: answers are as long as they may be."""


def save_tiny_model(folder: Path, *, seed: int = 1, num_layers: int = 4) -> Path:
    """Write a llama of hidden size 64 in float32."""
    save_model_folder(folder, byte_level())
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": NO_EOS,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(size, generator=generator) / size[-1] ** 0.5 if len(size) == 2 else torch.ones(size)
        for name, size in expected_tensors(read_shape(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
