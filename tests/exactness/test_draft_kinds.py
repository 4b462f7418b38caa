"""Every kind of draft that a configuration can name, as it is loaded from files: no token depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conf.schema import DraftKind
from pipeline.messages import Sampling
from stages.draft_speculator.load_source import load_source
from stages.model.weights import load_model
from tests.tiny import SYSTEMS, TinyPipeline, system_config
from tests.tiny_folder import TinyFolder, save_tiny_folder

PROMPT = "the cat and the dog and the cat"
KINDS = {
    "another model": {"kind": DraftKind.model},
    "first layer": {"kind": DraftKind.layers, "layers": 1},
    "all layers": {"kind": DraftKind.layers, "layers": 2},
    "look-up": {"kind": DraftKind.ngram},
    "another model and look-up": {"kind": DraftKind.model, "look_up": 2},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyFolder, Path]:
    """A target, and another model with its vocabulary."""
    root = tmp_path_factory.mktemp("models")
    return save_tiny_folder(root / "target"), save_tiny_folder(root / "draft", seed=2).folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("system", SYSTEMS[1:])
def test_every_system_returns_the_tokens_of_plain_decoding(
    folders: tuple[TinyFolder, Path], system: str, kind: dict[str, object], temperature: float
) -> None:
    target, draft_folder = folders
    config = system_config(system)
    config.model.path = str(target.folder)
    config.model.max_context = 128
    for name, value in kind.items():
        setattr(config.speculation.draft, name, value)
    if config.speculation.draft.kind is DraftKind.model:
        config.speculation.draft.path = str(draft_folder)
    sampling = Sampling(max_tokens=24, temperature=temperature, seed=11)
    source = load_source(config, num_ranked=8)
    pipeline = TinyPipeline(config, load_model(str(target.folder), dtype=torch.float64), source)
    prompt = target.tokenizer.encode(PROMPT).ids
    assert pipeline.generate(prompt, sampling) == target.expected(PROMPT, sampling)
