"""Runs the cells of a study, those that are missing, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from conf.check import check
from conf.compose import compose
from conf.schema import PlanMode, RunConfig
from pipeline.errors import ConfigError, RequestError, shown
from pipeline.messages import ChatTurn, SubmitRequest
from pipeline.model_source import resolve_models
from pipeline.sampling_options import sampling_of
from pipeline.tokenizer_settings import read_tokenizer_settings
from tools.bench.entries import Entry, parse_systems
from tools.bench.identity import fingerprint, model_identity, source_digest, versions
from tools.bench.prompts import PromptText, read_sets
from tools.predict.cells import Cell, CellKey
from tools.predict.clockless import ClocklessEngine
from tools.predict.settings import Study
from tools.predict.store import CellStore
from tools.progress import say

_PLAN_KEY = "speculation.plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a study runs."""

    study: Study
    systems: dict[str, RunConfig]
    """By label; resolved."""
    prompts: dict[str, list[PromptText]]
    """By set."""

    def keys(self) -> list[CellKey]:
        """Every cell, those that are compared next to one another."""
        return [
            CellKey(
                system=label, budget=budget, temperature=temperature, policy=policy.value, set_name=set_name
            )
            for label in self.systems
            for budget in self.study.budgets
            for temperature in self.study.temperatures
            for set_name in self.prompts
            for policy in self.study.policies
        ]

    def identity(self) -> dict[str, Any]:
        """All that the cells depend on beyond their keys."""
        settings = self.study.settings
        drafts = {label: config.speculation.draft.path for label, config in self.systems.items()}
        target = next(iter(self.systems.values())).model.path
        assert target is not None, "it is resolved"
        return {
            "max_tokens": settings.max_tokens,
            "seed": settings.seed,
            "prompts": fingerprint({name: [p.text for p in texts] for name, texts in self.prompts.items()}),
            "target": model_identity(Path(target)),
            "drafts": {label: path and model_identity(Path(path)) for label, path in drafts.items()},
            "systems": {label: msgspec.to_builtins(config) for label, config in self.systems.items()},
            "source": source_digest(),
            "versions": versions(),
        }


def make_plan(study: Study) -> Plan:
    """Compose, find the models, read the prompts. Raises `ConfigError`."""
    settings = study.settings
    systems: dict[str, RunConfig] = {}
    for entry in parse_systems(settings.systems):
        if not entry.is_ours:
            raise ConfigError(f"systems: {entry.name} is another engine; expected named runs of this one")
        try:
            config = compose(_arguments(entry, study))
            check(config)
            if not config.speculation.prepare_outcomes:
                raise ConfigError("this run prepares no outcomes; choose one that does, such as saguaro")
            if config.speculation.plan is PlanMode.auto:
                raise ConfigError(f"{_PLAN_KEY}=auto goes by the clock; expected {_PLAN_KEY}=fixed")
            systems[entry.label] = resolve_models(config)
        except ConfigError as error:
            raise ConfigError(f"systems: {shown(entry.label)}: {error}") from None
    prompts: dict[str, list[PromptText]] = {}
    for prompt in read_sets(settings.prompts, num_prompts=settings.num_prompts):
        prompts.setdefault(prompt.set_name, []).append(prompt)
    return Plan(study=study, systems=systems, prompts=prompts)


def _arguments(entry: Entry, study: Study) -> list[str]:
    """For `compose`. A plan that goes by the clock gives way, where none is asked for."""
    given = [*study.engine_arguments, *entry.overrides]
    is_given = any(argument.startswith(f"{_PLAN_KEY}=") for argument in given)
    return [f"conf={entry.name}", *given, *([] if is_given else [f"{_PLAN_KEY}={PlanMode.fixed.name}"])]


def run_plan(plan: Plan, store: CellStore) -> list[Cell]:
    """All cells of the plan, in its order. Raises `ConfigError` for a prompt that cannot be answered."""
    keys = plan.keys()
    for number, key in enumerate(keys, start=1):
        if key in store.cells:
            continue
        cell = _run_cell(plan, key)
        store.add(cell)
        hits = sum(answer.hits for answer in cell.answers)
        total = hits + sum(answer.misses for answer in cell.answers)
        say(f"{number}/{len(keys)}: {key}: {hits} hits of {total}")
    return [store.cells[key] for key in keys]


def _run_cell(plan: Plan, key: CellKey) -> Cell:
    """With a predictor that knows nothing yet, so that no cell depends on those before it."""
    config = copy.deepcopy(plan.systems[key.system])
    config.speculation.budget = key.budget
    config.speculation.fan_out = next(p for p in plan.study.policies if p.value == key.policy)
    check(config)
    prompts = plan.prompts[key.set_name]
    with ClocklessEngine(config) as engine:
        answers = []
        for prompt, request in zip(prompts, _requests(plan, key, config, prompts), strict=True):
            try:
                answers.append(engine.answer(request, index=prompt.index))
            except RequestError as error:
                raise ConfigError(f"{prompt.origin}: {error}") from None
    return Cell(key=key, answers=answers)


def _requests(
    plan: Plan, key: CellKey, config: RunConfig, prompts: Sequence[PromptText]
) -> list[SubmitRequest]:
    settings = plan.study.settings
    assert config.model.path is not None, "it is resolved"
    is_chat = read_tokenizer_settings(Path(config.model.path)).chat_template is not None
    return [
        SubmitRequest(
            request_id=str(prompt.index),
            prompt=None if is_chat else prompt.text,
            chat=[ChatTurn(role="user", content=prompt.text)] if is_chat else None,
            sampling=msgspec.structs.replace(
                sampling_of(config, seed=settings.seed + prompt.index),
                max_tokens=settings.max_tokens,
                temperature=key.temperature,
            ),
            submitted_ns=0,
        )
        for prompt in prompts
    ]
