"""Where a model comes from: turns what a user names into a local folder that `load_model` can read.

`python -m stages.model.source [PATH]` prepares a model (the demo without PATH) and prints its folder.
Conversions are done once and cached; only they import transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ConfigError, shown, shown_path
from stages.model.cache_folder import build_once
from stages.model.draft_card import is_draft_folder

_CONVERTER_VERSION = 2
"""Part of the cache key of every conversion: raise it when one changes."""
_DEMO_VERSION = 1
"""The same, for the demo model."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_DUPLICATES = ["consolidated*.safetensors", "original/*"]
"""The same weights in another layout."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
_TOKENIZER_SOURCES = ["*.model", "*.tiktoken", "vocab.*", "merges.txt"]
"""What transformers makes a tokenizer of."""


def resolve(path: str | Path | None, *, needs_tokenizer: bool = True) -> Path:
    """The local folder of a model, with config.json, safetensors and tokenizer.json.

    path: None for the demo model, a local folder, a .gguf file, or a Hugging Face id.
    needs_tokenizer: False accepts a folder without one. A distilled draft never has one: it goes by its
        target's, and is returned as it is.
    Slow steps write one line each to stderr. Raises `ConfigError`.
    """
    if path is None:
        return _demo_folder()
    try:
        local = Path(path).expanduser()
        is_file, is_folder = local.is_file(), local.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown ~user, a NUL byte
        raise ConfigError(
            f"model.path={shown_path(path)} is no path that this system takes: {error}; correct it"
        ) from None
    if not is_file and not is_folder:
        _refuse_dangling(path, local)
    if is_file:
        if local.suffix != ".gguf":
            raise ConfigError(f"model.path={shown_path(path)} is a file, expected a folder or a .gguf file")
        return _gguf_folder(local)
    if is_folder:
        folder = local.resolve()
    elif _HUB_ID.fullmatch(str(path)) and local.suffix != ".gguf":
        folder = _download(str(path))
    else:
        raise ConfigError(
            f"model.path={shown_path(path)} does not exist; "
            "expected a folder, a .gguf file or a Hugging Face id (owner/name)"
        )
    if needs_tokenizer and not (folder / "tokenizer.json").is_file() and not is_draft_folder(folder):
        return _with_tokenizer(folder)
    return folder


def _refuse_dangling(path: str | Path, local: Path) -> None:
    """A link that leads nowhere was meant as a path: it must not be fetched as a hub id of that name."""
    for part in (local, *local.parents):
        if part.is_symlink() and not part.exists():
            goal = shown_path(os.readlink(part))
            raise ConfigError(
                f"model.path={shown_path(path)}: {shown_path(part)} is a link to {goal}, "
                "which does not exist; correct the link"
            )


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _demo_folder() -> Path:
    # Imported here, as below: conversion libraries would slow down every start after the first.
    def build(folder: Path) -> None:
        from stages.model.demo import build_demo

        build_demo(folder, _report)

    return build_once(f"demo-SmolLM2-135M-Instruct-v{_DEMO_VERSION}", build)


def _gguf_folder(path: Path) -> Path:
    def build(folder: Path) -> None:
        from stages.model.gguf_folder import convert_gguf

        _report(f"converting {path.name} to safetensors (once)")
        convert_gguf(path, folder)

    return build_once(_key(path.stem, path), build)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    fetch: Callable[..., str] = snapshot_download
    files = {"allow_patterns": _HUB_FILES, "ignore_patterns": _HUB_DUPLICATES}
    try:
        cached = Path(fetch(hub_id, local_files_only=True, **files))
        if has_weights(cached):
            return cached
        _report(f"completing {hub_id} from Hugging Face")
    except LocalEntryNotFoundError:
        _report(f"fetching {hub_id} from Hugging Face")
    except HFValidationError as error:
        raise ConfigError(f"model.path={hub_id} is not a Hugging Face id: {error}") from error
    try:
        return Path(fetch(hub_id, **files))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"model.path={hub_id} is no local folder, and Hugging Face cannot be reached: expected a network "
            "or a local folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.path={hub_id} is no local folder and could not be fetched from Hugging Face: {reason}; "
            "check the name and the network, or name a local folder"
        ) from error


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a configuration and every weight file it names.

    A snapshot may be incomplete: an interrupted download, or another program that wanted the tokenizer only.
    """
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False
    return bool(names) and all(isinstance(name, str) and (folder / name).is_file() for name in names)


def _with_tokenizer(folder: Path) -> Path:
    """A cached folder of links to the model's files, with the tokenizer converted to tokenizer.json."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; expected a model folder")
    if not any(file for pattern in _TOKENIZER_SOURCES for file in folder.glob(pattern)):
        raise ConfigError(
            f"{folder} has no tokenizer.json, and no tokenizer to make it of; add tokenizer.json"
        )

    def build(target: Path) -> None:
        from transformers import AutoTokenizer

        _report(f"converting the tokenizer of {folder.name} (once)")
        try:
            AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(target)
        except Exception as error:  # transformers raises whatever its converters do
            reason = shown(" ".join(str(error).split()) or type(error).__name__, most=200)
            raise ConfigError(
                f"{folder} has no tokenizer.json and its tokenizer cannot be converted: {reason}; "
                "add tokenizer.json"
            ) from error
        if not (target / "tokenizer.json").is_file():
            raise ConfigError(f"{folder} has no tokenizer.json and no tokenizer that yields one; add it")
        for file in folder.iterdir():
            if file.is_file() and not (target / file.name).exists():
                (target / file.name).symlink_to(file.resolve())

    return build_once(_key(folder.name, folder / "config.json"), build)


def _key(stem: str, path: Path) -> str:
    """A cache key that changes when the file does."""
    stat = path.stat()
    identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{_CONVERTER_VERSION}"
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', stem)[:60]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def main() -> int:
    """Prepare the model named on the command line, or the demo."""
    try:
        print(resolve(sys.argv[1] if len(sys.argv) > 1 else None))
    except ConfigError as error:
        _report(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
