"""Composes the arguments of a command line into a `RunConfig`.

    defaults of `conf.schema`  <  conf/GROUP/NAME.yaml  <  the named run conf/conf/NAME.yaml  <  key=value

`conf.schema_file` does the composing; the names of keys, groups and runs are checked here before, and short
forms filled in. What may stand in a value, and which keys go together, is for `conf.check` to say. Knows
nothing about prompts: the command line takes those out first.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.errors import ConfigError, shown
from conf.keys import GROUPS, all_keys
from conf.option_values import choices, logit_bias, stop_strings
from conf.schema import DraftKind, RunConfig
from conf.schema_file import compose_schema, parse_arguments

_FOLDER = Path(__file__).resolve().parent

_PATH_KEYS = ("model.path", "speculation.draft.path")
"""Keys whose value is taken as it stands: a path may hold what Hydra's grammar gives a meaning to."""
_GRAMMARS = "structured_outputs."
_GRAMMAR_KEYS = tuple(_GRAMMARS + name for name in ("json", "regex", "grammar", "choice"))
"""As much as paths."""


def compose(arguments: Sequence[str] = ()) -> RunConfig:
    """Compose `key=value` arguments, each a key of the schema or a group, into a configuration.

    Short forms: `model.path=X` alone means `model=custom`, `speculation.tree.widths=X` takes the place of the
    named run's `nodes`, and `speculation.draft.path=X` or
    `speculation.draft.layers=N` alone chooses the draft kind that it belongs to, where the run has a draft.

    Raises `ConfigError` for an unknown key, group file or named run, for a key given twice, and for a value
    of the wrong type.
    """
    given = parse_arguments(arguments, example="max_tokens=64")
    _check_names(given)
    paths = {key: given.pop(key) for key in _PATH_KEYS if key in given}
    stop, bias = given.pop("stop", None), given.pop("logit_bias", None)
    grammars = {key: given.pop(key) for key in _GRAMMAR_KEYS if key in given}
    if "model.path" in paths:
        _choose_custom_model(given)
    config = compose_schema(RunConfig, folder=_FOLDER, file="config", given=given)
    _set_paths(config, paths)
    if stop is not None:
        config.stop = stop_strings(stop)
    if bias is not None:
        config.logit_bias = logit_bias(bias)
    for key, value in grammars.items():
        name = key.removeprefix(_GRAMMARS)
        text = None if value == "null" else value
        setattr(config.structured_outputs, name, choices(value) if name == "choice" else text)
    _settle_draft(config, given={*given, *paths})
    if "speculation.tree.widths" in given and "speculation.tree.nodes" not in given:
        config.speculation.tree.nodes = None  # the named run's own shape makes way
    return config


def options_of(group: str) -> list[str]:
    """The names that `GROUP=NAME` accepts, sorted."""
    return sorted(file.stem for file in (_FOLDER / group).glob("*.yaml"))


def description_of(group: str, name: str) -> str:
    """The comment at the head of a group file, in one line."""
    lines = (_FOLDER / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    return " ".join(line for line in comments if not line.startswith("@package"))


def _check_names(given: Mapping[str, str]) -> None:
    known = all_keys()
    for key, value in given.items():
        if key in GROUPS:
            _check_option(key, value)
        elif key in ("model.name", "placement.name"):
            group = key.partition(".")[0]
            raise ConfigError(f"{key}={shown(value)}: this key follows from {group}=NAME; give that instead")
        elif key not in known:
            candidates = [*known, *GROUPS, "prompt", "prompts_file", "output", "listen"]
            near = _same_last_part(key, candidates) or difflib.get_close_matches(key, candidates, n=1)
            advice = f"did you mean {near[0]}?" if near else "--help lists the keys"
            raise ConfigError(f"{shown(key)}={shown(value)}: there is no key '{shown(key)}'; {advice}")


def _check_option(group: str, name: str) -> None:
    if name in (options := options_of(group)):
        return
    near = difflib.get_close_matches(name, options, n=1)
    advice = f"did you mean {near[0]}? " if near else ""
    what = "named run" if group == "conf" else group
    hint = "; a model of your own is given as model.path=ID|FOLDER|FILE.gguf" if group == "model" else ""
    raise ConfigError(
        f"{group}={shown(name)}: there is no {what} '{shown(name)}'; "
        f"{advice}available: {', '.join(options)}{hint}"
    )


def _same_last_part(key: str, candidates: Sequence[str]) -> list[str]:
    """Candidates that end like `key`: who types `depth` means `speculation.depth`."""
    last = key.rpartition(".")[2]
    return [candidate for candidate in candidates if candidate.rpartition(".")[2] == last]


def _choose_custom_model(given: dict[str, str]) -> None:
    if given.setdefault("model", "custom") == "demo":
        raise ConfigError("model=demo and model.path exclude each other; leave out model=demo")


def _set_paths(config: RunConfig, paths: Mapping[str, str]) -> None:
    for key, value in paths.items():
        path = None if value == "null" else value
        if key == "model.path":
            config.model.path = path
        else:
            config.speculation.draft.path = path


def _settle_draft(config: RunConfig, *, given: set[str]) -> None:
    """Choose the draft kind that a lone path or layer count implies; drop what the named run leaves over."""
    draft = config.speculation.draft
    if "speculation.draft.kind" not in given and draft.kind is not DraftKind.none:
        if "speculation.draft.path" in given and draft.path is not None:
            draft.kind = DraftKind.model
        elif "speculation.draft.layers" in given and draft.layers is not None:
            draft.kind = DraftKind.layers
    if draft.kind is not DraftKind.layers and "speculation.draft.layers" not in given:
        draft.layers = None
    if draft.kind is not DraftKind.model and "speculation.draft.path" not in given:
        draft.path = None
