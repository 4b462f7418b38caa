"""The rules that a configuration must keep beyond its types: ranges, and keys that need one another.

Every rule raises one `ConfigError` of the form `key=value: expected ...; what to change`. Looks at
nothing but the configuration and the number of cores: whether a model exists is found out when it is loaded.
"""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass

from conf.check_emulated import check_emulated
from conf.check_options import check_options
from conf.errors import ConfigError, shown, shown_path
from conf.kv_memory import parse_kv_memory
from conf.limits import MAX_BUDGET, MAX_DEPTH, MAX_NODES, MAX_SEED, MAX_TEMPERATURE, MAX_WHOLE_NUMBER
from conf.proposal_size import nodes_of_widths
from conf.schema import (
    DraftKind,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SpeculationConfig,
    Verification,
)


def check(config: RunConfig, *, available_cores: int | None = None) -> None:
    """Raise `ConfigError` for the first rule that `config` breaks.

    available_cores: cores this process may use; None asks the operating system.
    """
    if available_cores is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        available_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    _check_whole_numbers(config, prefix="")
    _check_requests(config)
    check_options(config)
    _check_model(config.model)
    _check_placement(config.placement, available_cores)
    _check_speculation(config.speculation)
    _check_rejection(config)
    _check_saguaro(config)
    _check_tree(config.speculation)
    _check_draft(config.speculation)
    check_emulated(config)


def _check_whole_numbers(group: object, *, prefix: str) -> None:
    """Every whole number is bounded on both sides, used or not: all of them travel to the stages."""
    assert is_dataclass(group)
    for field in fields(group):
        key, value = prefix + field.name, getattr(group, field.name)
        if is_dataclass(value):
            _check_whole_numbers(value, prefix=key + ".")
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            # The seed has a range of its own.
            if key != "seed" and isinstance(number, int) and abs(number) > MAX_WHOLE_NUMBER:
                advice = "raise it" if number < 0 else "lower it"
                raise ConfigError(
                    f"{key}={shown(value)}: expected at most {MAX_WHOLE_NUMBER} in size; {advice}"
                )


def _check_requests(config: RunConfig) -> None:
    _at_least("max_tokens", config.max_tokens, 1)
    if not 0 <= config.temperature <= MAX_TEMPERATURE:  # which NaN is not either
        raise ConfigError(
            f"temperature={config.temperature}: expected a finite number of at least 0 and at most "
            f"{MAX_TEMPERATURE}; 0 is greedy"
        )
    _at_least("top_k", config.top_k, 0, advice="0 keeps every token")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p={config.top_p}: expected more than 0 and at most 1; 1 keeps every token")
    if not 0 <= config.min_p <= 1:
        raise ConfigError(f"min_p={config.min_p}: expected 0 to 1; 0 drops no token")
    if config.seed is not None and not 0 <= config.seed <= MAX_SEED:
        raise ConfigError(f"seed={config.seed}: expected 0 to {MAX_SEED}; leave it out for a fresh one")
    _at_least("max_requests", config.max_requests, 1, advice="1 answers one prompt after the other")


def _check_model(model: ModelConfig) -> None:
    if model.name == "custom" and model.path is None:
        raise ConfigError("model=custom: expected model.path=ID|FOLDER|FILE.gguf beside it; add it")
    _not_blank("model.path", model.path)
    _at_least("model.max_context", model.max_context, 2, advice="a prompt token and an answer token")


def _check_placement(placement: PlacementConfig, available_cores: int) -> None:
    target, draft = placement.target_cores, placement.draft_cores
    for key, cores in (("placement.target_cores", target), ("placement.draft_cores", draft)):
        if cores is not None and not 1 <= cores <= available_cores:
            advice = "raise it" if cores < 1 else "lower it"
            raise ConfigError(
                f"{key}={cores}: expected 1 to {available_cores}, the cores this process may use; {advice}"
            )
    needed = (target or 1) + (draft or 1)
    is_given = target is not None or draft is not None
    if placement.name == "cpu_split" and is_given and needed > available_cores:
        raise ConfigError(
            f"placement.target_cores={_typed(target)} and placement.draft_cores={_typed(draft)}: expected a "
            f"sum of at most {available_cores}, the cores this process may use, with one left for each side; "
            "lower one, or choose placement=cpu_shared"
        )
    _at_least("placement.page_size", placement.page_size, 1)
    _at_least("placement.prefill_chunk", placement.prefill_chunk, 1)
    parse_kv_memory(placement.kv_memory)


def _check_speculation(speculation: SpeculationConfig) -> None:
    no_draft = "conf=autoregressive decodes without a draft"
    _at_least("speculation.depth", speculation.depth, 1, advice=no_draft)
    _at_most("speculation.depth", speculation.depth, MAX_DEPTH)
    if not 0 <= speculation.min_path_prob < 1:
        raise ConfigError(
            f"speculation.min_path_prob={speculation.min_path_prob}: expected at least 0 and less than 1; "
            "0 reads on whatever the draft thinks of it"
        )
    if speculation.prepare_outcomes:
        advice = "conf=speculative prepares no outcomes"
        _at_least("speculation.budget", speculation.budget, 1, advice=advice)
        _at_most("speculation.budget", speculation.budget, MAX_BUDGET)


def _check_rejection(config: RunConfig) -> None:
    speculation = config.speculation
    if speculation.verification is not Verification.rejection:
        return
    if config.model.is_emulated:
        raise ConfigError(
            "speculation.verification=rejection: expected a real model, and an emulated one has no laws to "
            "compare; leave the key out"
        )


def _check_saguaro(config: RunConfig) -> None:
    speculation = config.speculation
    c = speculation.saguaro_c
    if c is None:
        return
    if not 0 <= c <= 1:  # which NaN is not either
        raise ConfigError(f"speculation.saguaro_c={c}: expected 0 to 1; 1 draws from the draft's own law")
    if speculation.verification is not Verification.rejection:
        raise ConfigError(
            f"speculation.saguaro_c={c}: expected speculation.verification=rejection beside it, and the run "
            f"has {speculation.verification.name}; set it or leave the key out"
        )
    if speculation.tree.nodes is not None:
        raise ConfigError(
            f"speculation.saguaro_c={c}: expected a chain or speculation.tree.widths beside it, and the run "
            f"has speculation.tree.nodes={speculation.tree.nodes}, where nothing is drawn; give "
            "speculation.tree.widths=[2,2,1] or leave the key out"
        )
    kind = speculation.draft.kind
    is_look_up = kind is DraftKind.ngram or (kind is DraftKind.auto and config.model.path is not None)
    if is_look_up or kind is DraftKind.none:
        what = "proposes what look-up finds" if is_look_up else "has no draft"
        raise ConfigError(
            f"speculation.saguaro_c={c}: expected a draft with a law to draw from, and the run {what}; give "
            "speculation.draft.path=ID|FOLDER|FILE.gguf or leave the key out"
        )


def _check_tree(speculation: SpeculationConfig) -> None:
    tree = speculation.tree
    if tree.widths is not None and tree.nodes is not None:
        raise ConfigError(
            f"speculation.tree.nodes={tree.nodes}: expected either nodes or widths, and "
            f"widths={shown(str(tree.widths))}; leave one out"
        )
    if tree.nodes is not None:
        _at_least(
            "speculation.tree.nodes", tree.nodes, 1, advice="conf=autoregressive decodes without a draft"
        )
        _at_most("speculation.tree.nodes", tree.nodes, MAX_NODES)
    if tree.rows is not None:
        _at_least("speculation.tree.rows", tree.rows, 1)
    if tree.widths is not None:
        shown_widths = str(tree.widths).replace(" ", "")
        if not 1 <= len(tree.widths) <= MAX_DEPTH or min(tree.widths) < 1:
            raise ConfigError(
                f"speculation.tree.widths={shown_widths}: expected 1 to {MAX_DEPTH} numbers of at least 1, "
                "such as [4,2,1]; or leave it out for a chain"
            )
        if (count := nodes_of_widths(tree.widths)) > MAX_NODES:
            raise ConfigError(
                f"speculation.tree.widths={shown_widths}: expected at most {MAX_NODES} nodes, these are "
                f"{shown(str(count))}; lower some"
            )


def _check_draft(speculation: SpeculationConfig) -> None:
    draft = speculation.draft
    if draft.kind is DraftKind.none and speculation.prepare_outcomes:
        raise ConfigError(
            "speculation.draft.kind=none: expected auto, model, layers or ngram, because "
            "speculation.prepare_outcomes=true needs a draft; conf=autoregressive decodes without one"
        )
    if draft.kind is DraftKind.model and draft.path is None:
        raise ConfigError(
            "speculation.draft.kind=model: expected speculation.draft.path=ID|FOLDER|FILE.gguf beside it; "
            "add it"
        )
    if draft.kind is not DraftKind.model and draft.path is not None:
        _refuse_without_kind("speculation.draft.path", draft.path, draft.kind, "model")
    _not_blank("speculation.draft.path", draft.path)
    if draft.kind is DraftKind.layers:
        if draft.layers is None:
            raise ConfigError(
                "speculation.draft.kind=layers: expected speculation.draft.layers=N beside it; add it"
            )
        _at_least("speculation.draft.layers", draft.layers, 1)
    elif draft.layers is not None:
        _refuse_without_kind("speculation.draft.layers", str(draft.layers), draft.kind, "layers")
    _at_least("speculation.draft.look_up", draft.look_up, 0, advice="0 looks nothing up")
    _at_most("speculation.draft.look_up", draft.look_up, MAX_DEPTH)
    if draft.look_up and draft.kind in (DraftKind.none, DraftKind.ngram):
        raise ConfigError(
            f"speculation.draft.look_up={draft.look_up}: expected a draft beside which to look up, and the "
            f"run has speculation.draft.kind={draft.kind.name}; set that to auto, model or layers, or leave "
            "look_up out"
        )


def _at_least(key: str, value: int, least: int, *, advice: str = "raise it") -> None:
    if value < least:
        raise ConfigError(f"{key}={value}: expected at least {least}; {advice}")


def _at_most(key: str, value: int, most: int) -> None:
    if value > most:
        raise ConfigError(f"{key}={value}: expected at most {most}; lower it")


def _typed(value: object) -> str:
    return "null" if value is None else str(value)


def _not_blank(key: str, path: str | None) -> None:
    if path is not None and not path.strip():
        raise ConfigError(f"{key}={shown_path(path)}: expected ID|FOLDER|FILE.gguf; it is empty")


def _refuse_without_kind(key: str, value: str, kind: DraftKind, needed: str) -> None:
    raise ConfigError(
        f"{key}={shown_path(value)}: expected speculation.draft.kind={needed} beside it, and the run has "
        f"{kind.name}; set speculation.draft.kind={needed} or leave the key out"
    )
