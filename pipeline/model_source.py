"""Finds the local folders of the models that a configuration names, before any stage starts.

Finding may mean fetching and converting, which takes libraries that the frontend does without. So it happens
in a process of its own, which imports the resolver by name, as stage processes import their stages: the
runtime knows no models. Run as a module, this file is that process.
"""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from pathlib import Path

from conf.schema import DraftKind, RunConfig
from pipeline.errors import ConfigError, EngineDead, shown_path
from pipeline.import_path import environment_of_ours

_RESOLVER = "stages.model.source:resolve"
"""A function from a model's name, None for the demo, to its folder. Its progress goes to stderr."""
_EMULATED_RESOLVER = "stages.model.emulated_folder:folder_of"
"""The same for an emulated model, whose name is the size of its vocabulary."""
_DEMO_DRAFT = Path(__file__).resolve().parents[1] / "stages" / "draft_speculator" / "demo"
"""The draft that comes with the built-in demo model, made by `tools.distill`."""


def resolve_models(config: RunConfig, *, resolver: str = _RESOLVER) -> RunConfig:
    """A copy of `config` in which `model.path` and `speculation.draft.path` are local folders.

    A draft of kind `auto` becomes what it stands for.

    Raises `ConfigError` for a model that cannot be had, and `EngineDead` if the resolver breaks.
    """
    resolved = copy.deepcopy(config)
    if config.model.is_emulated:
        return _with_emulated_models(resolved)
    resolved.model.path = _resolve(config.model.path, resolver)
    draft = resolved.speculation.draft
    if draft.kind is DraftKind.auto:
        is_demo = config.model.path is None
        draft.kind = DraftKind.model if is_demo else DraftKind.ngram
        draft.path = str(_DEMO_DRAFT) if is_demo else None
        return resolved
    if draft.kind is DraftKind.model and draft.path is not None:
        if draft.path == config.model.path:
            draft.path = resolved.model.path
            return resolved
        try:
            draft.path = _resolve(draft.path, resolver)
        except ConfigError as error:
            # The resolver knows one key, the target's, and does not always name it.
            reason = str(error).removeprefix(f"model.path={shown_path(draft.path)}")
            separator = "" if reason != str(error) else ": "
            raise ConfigError(f"speculation.draft.path={shown_path(draft.path)}{separator}{reason}") from None
    return resolved


def _with_emulated_models(config: RunConfig) -> RunConfig:
    """The folder holds a tokenizer only. The draft belongs to the target and has no path."""
    config.model.path = _resolve(str(config.model.emulated.vocab_size), _EMULATED_RESOLVER)
    if config.speculation.draft.kind is DraftKind.auto:
        config.speculation.draft.kind = DraftKind.model
    return config


def _resolve(path: str | None, resolver: str) -> str:
    # -P: the caller's folder may hold files that are named like modules.
    command = [sys.executable, "-P", "-m", "pipeline.model_source", resolver]
    done = subprocess.run(
        command if path is None else [*command, path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment_of_ours(),
        check=False,
    )
    answer = _parse_answer(done.stdout)
    if "error" in answer:
        raise ConfigError(answer["error"])
    if "folder" not in answer:
        raise EngineDead(
            f"finding the model {shown_path(path or 'demo')} ended with status {done.returncode}, see above"
        )
    return answer["folder"]


def _parse_answer(stdout: bytes) -> dict[str, str]:
    """The last line is the answer; libraries may have printed before it."""
    lines = stdout.decode(errors="replace").splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _answer(resolver: str, path: str | None) -> dict[str, str]:
    module, _, function = resolver.partition(":")
    try:
        return {"folder": str(getattr(importlib.import_module(module), function)(path))}
    except ConfigError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    try:
        print(json.dumps(_answer(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)))
    except KeyboardInterrupt:
        sys.exit(130)  # the frontend got the signal as well, and says so
