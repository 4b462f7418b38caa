"""The draft that comes with the demo model: it is there, it is small, and `auto` finds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conf.compose import compose
from conf.schema import DraftKind
from pipeline import model_source
from pipeline.model_source import resolve_models
from stages.model.draft_folder import load_draft_folder
from stages.model.source import resolve

_FOLDER = Path(model_source._DEMO_DRAFT)
_MOST_BYTES = 34_000_000


def test_it_is_small_and_says_how_it_was_made() -> None:
    assert sum(file.stat().st_size for file in _FOLDER.iterdir()) < _MOST_BYTES
    card = (_FOLDER / "README.md").read_text(encoding="utf-8")
    assert "python -m tools.distill target=demo" in card
    assert "/root" not in card


@pytest.mark.demo
def test_it_fits_the_demo_model() -> None:
    loaded = load_draft_folder(_FOLDER, resolve(None), dtype=torch.bfloat16)
    assert loaded.model.weights.head.shape[0] == len(loaded.head_token_ids) >= 8192


@pytest.mark.demo
@pytest.mark.parametrize("name", ["speculative", "ssd", "saguaro"])
def test_auto_is_this_draft_for_the_demo(name: str) -> None:
    draft = resolve_models(compose([f"conf={name}"])).speculation.draft
    assert (draft.kind, draft.path) == (DraftKind.model, str(_FOLDER))


def test_auto_is_look_up_for_any_other_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    config = resolve_models(compose(["conf=saguaro", f"model.path={tmp_path / 'model'}"]))
    assert (config.speculation.draft.kind, config.speculation.draft.path) == (DraftKind.ngram, None)
