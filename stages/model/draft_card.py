"""The marker of a distilled draft: the object `draft` in its config.json. Read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCard:
    """What config.json says of a draft under the key `draft`."""

    version: int
    head_vocabulary: int
    """R: rows of the head."""
    tokenizer_sha256: str
    """Of the target's tokenizer.json."""


def is_draft_folder(folder: Path) -> bool:
    """Whether config.json carries the marker. False for anything that cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get("draft"), dict)


def read_card(folder: Path) -> DraftCard:
    path = folder / "config.json"
    try:
        entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["draft"]
        card = DraftCard(
            version=int(entry["version"]),
            head_vocabulary=int(entry["head_vocabulary"]),
            tokenizer_sha256=str(entry["tokenizer_sha256"]),
        )
        embedding = entry["embedding"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected an object `draft` with version, embedding, head_vocabulary and "
            f"tokenizer_sha256, got {error!r}; make the draft again with python -m tools.distill"
        ) from None
    if card.version != FORMAT_VERSION or embedding != "target":
        raise ConfigError(
            f"{path}: the draft has version {card.version} and embedding {embedding!r}, expected "
            f"{FORMAT_VERSION} and 'target'; make it again with python -m tools.distill"
        )
    return card
