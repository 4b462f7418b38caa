"""From settings to what will be run: systems with their workers' specifications, prompts with their ids.

Everything that the user can mend is found here, before a worker starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from conf.check import check
from conf.compose import compose, options_of
from conf.schema import PlacementConfig, RunConfig
from pipeline.errors import ConfigError, RequestError, shown, shown_path
from pipeline.messages import ChatTurn
from pipeline.model_source import resolve_models
from pipeline.placement import plan_cores
from pipeline.tokenizer_settings import read_tokenizer_settings
from pipeline.topology import usable_cores
from stages.model.draft_card import is_draft_folder
from stages.model.shape import read_shape
from stages.tokenizer import PromptEncoder
from tools.bench.cases import Case, Phase
from tools.bench.entries import PLAIN_RUN, Entry, choose_baseline, parse_systems
from tools.bench.identity import fingerprint, machine, model_identity, source_digest, versions
from tools.bench.prompts import PromptText, read_sets
from tools.bench.protocol import EngineSpec, PeerSpec, Question, WorkerSpec
from tools.bench.settings import BenchSettings, LlamaFormat, SetUp

_PLACEMENTS = {
    SetUp.same_target_cores: PlacementConfig(name="cpu_split", target_cores=1),
    SetUp.same_total_cores: PlacementConfig(name="cpu_shared"),
}
_MIN_CONTEXT = 512
_DRAFTING_RUN = "speculative"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSystem:
    """One system and what its workers are told."""

    entry: Entry
    spec: WorkerSpec
    """For one question at a time and all cores."""

    @property
    def label(self) -> str:
        """What it is called."""
        return self.entry.label

    def spec_for(self, phase: Phase) -> WorkerSpec:
        """The same for that phase."""
        placement = _PLACEMENTS[phase.setup]
        if isinstance(self.spec, PeerSpec):
            cores = list(plan_cores(placement, usable_cores()).target)
            return msgspec.structs.replace(self.spec, cores=cores, batch_size=phase.batch_size)
        return EngineSpec(config=_in_phase(self.spec.config, phase))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrompt:
    """One prompt and its question."""

    set_name: str
    index: int
    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run."""

    settings: BenchSettings
    folder: Path
    """Of the target."""
    systems: list[PlannedSystem]
    baseline: Entry
    prompts: list[PlannedPrompt]

    @property
    def phases(self) -> list[Phase]:
        """In their order."""
        settings = self.settings
        return [
            Phase(setup=setup, batch_size=batch_size)
            for setup in settings.setup_list
            for batch_size in settings.batch_size_list
        ]

    @property
    def cases(self) -> list[Case]:
        """In their order."""
        temperatures = self.settings.temperature_list
        return [Case(phase=phase, temperature=t) for phase in self.phases for t in temperatures]

    def systems_in(self, phase: Phase) -> list[PlannedSystem]:
        """Those that take batches of that size."""
        return [s for s in self.systems if s.entry.takes_batches or phase.batch_size == 1]

    def groups(self, batch_size: int) -> list[list[PlannedPrompt]]:
        """The prompts that are asked at once: of one set, in its order. A set's last group may be smaller."""
        groups: list[list[PlannedPrompt]] = []
        for prompt in self.prompts:
            last = groups[-1] if groups else []
            if not last or last[-1].set_name != prompt.set_name or len(last) == batch_size:
                groups.append(last := [])
            last.append(prompt)
        return groups

    def system(self, label: str) -> PlannedSystem:
        """The one of that label."""
        return next(system for system in self.systems if system.label == label)

    def identity(self) -> dict[str, Any]:
        """All that an answer and its time depend on, but for what more answers are added for: repeats,
        temperatures, batch sizes and set-ups.
        """
        prompts = [(prompt.set_name, prompt.index, prompt.question) for prompt in self.prompts]
        return {
            "target": model_identity(self.folder),
            "systems": {system.label: msgspec.to_builtins(system.spec) for system in self.systems},
            "drafts": {label: model_identity(Path(draft)) for label, draft in self._drafts()},
            "prompts": fingerprint(msgspec.to_builtins(prompts)),
            "machine": machine(),
            "versions": versions(),
            "source": source_digest(),
        }

    def _drafts(self) -> list[tuple[str, str]]:
        drafts = []
        for system in self.systems:
            spec = system.spec
            path = spec.draft if isinstance(spec, PeerSpec) else spec.config.speculation.draft.path
            if path is not None:
                drafts.append((system.label, path))
        return drafts


def make_plan(settings: BenchSettings) -> Plan:
    """Compose, find the models, read and encode the prompts. Raises `ConfigError`."""
    entries = parse_systems(settings.systems)
    baseline = choose_baseline(entries, settings.baseline)
    texts = read_sets(settings.prompts, num_prompts=settings.num_prompts)
    _check_cores(settings.setup_list)
    plain = _resolved(Entry(label=PLAIN_RUN, name=PLAIN_RUN), settings)
    assert plain.model.path is not None, "it is resolved"
    _check_peers(entries, plain)
    folder = Path(plain.model.path)
    prompts = _encode(texts, folder, settings)
    _check_lengths(prompts, texts, _longest_context(plain, folder))
    longest = max(len(prompt.question.prompt_token_ids) for prompt in prompts)
    systems = [
        PlannedSystem(
            entry=entry,
            spec=EngineSpec(config=_resolved(entry, settings))
            if entry.is_ours
            else _peer_spec(
                entry, settings, folder, max_context=max(_MIN_CONTEXT, longest + settings.max_tokens)
            ),
        )
        for entry in entries
    ]
    plan = Plan(settings=settings, folder=folder, systems=systems, baseline=baseline, prompts=prompts)
    _check_phases(plan)
    return plan


def _in_phase(config: RunConfig, phase: Phase) -> RunConfig:
    placement = _PLACEMENTS[phase.setup]
    own = replace(config.placement, name=placement.name, target_cores=placement.target_cores)
    return replace(config, placement=own, max_requests=phase.batch_size)


def _resolved(entry: Entry, settings: BenchSettings) -> RunConfig:
    """The run's configuration with local models."""
    with _in_words_of(entry):
        return resolve_models(_composed(entry, settings))


def _composed(entry: Entry, settings: BenchSettings) -> RunConfig:
    """The run's configuration, as `python -m pipeline.run` would have it."""
    arguments = [
        f"conf={entry.name}",
        f"placement={_PLACEMENTS[SetUp.same_total_cores].name}",
        f"model.dtype={settings.dtype.name}",
        f"max_tokens={settings.max_tokens}",
        "placement.prefix_cache=false",  # repeats and other temperatures ask the same prompts again
        *entry.overrides,
    ]
    if settings.model is not None:
        key = "model" if _is_model_of_ours(settings.model) else "model.path"
        arguments.append(f"{key}={settings.model}")
    config = compose(arguments)
    check(config)
    return config


@contextmanager
def _in_words_of(entry: Entry) -> Iterator[None]:
    """A mistake that is found inside is told with the bench's keys."""
    try:
        yield
    except ConfigError as error:
        where = f"systems: {shown(entry.label)}: " if entry.overrides else ""
        raise ConfigError(where + str(error).replace("model.path=", "model=")) from None


def _is_model_of_ours(model: str) -> bool:
    """Whether it is a file of the model group that names its model itself. A folder called so is `./NAME`."""
    return model in options_of("model") and model != "custom"


def _check_peers(entries: Sequence[Entry], plain: RunConfig) -> None:
    for entry in entries:
        if plain.model.is_emulated and not entry.is_ours:
            raise ConfigError(
                f"model={plain.model.name}: expected systems of ours only, because an emulated model has no "
                f"weights for {entry.name}; leave {shown(entry.label)} out of systems="
            )


def _check_phases(plan: Plan) -> None:
    for system in plan.systems:
        for phase in plan.phases:
            if system.entry.is_ours:
                try:
                    # As given, since a rule is about what the user can mend.
                    check(_in_phase(_composed(system.entry, plan.settings), phase))
                except ConfigError as error:
                    raise ConfigError(f"systems: {shown(system.label)}: {phase}: {error}") from None


def _peer_spec(entry: Entry, settings: BenchSettings, folder: Path, *, max_context: int) -> PeerSpec:
    own = dict(override.partition("=")[::2] for override in entry.overrides)
    return PeerSpec(
        name=entry.name,
        folder=str(folder),
        dtype=settings.dtype,
        cores=list(usable_cores()),
        max_context=max_context,
        batch_size=1,
        draft=_assistant(entry, own.get("draft", settings.draft), settings),
        assistant_tokens=_whole(entry, own, "assistant_tokens", settings.assistant_tokens),
        lookup_tokens=_whole(entry, own, "lookup_tokens", settings.lookup_tokens) or settings.lookup_tokens,
        llama_format=_llama_format(entry, own.get("llama_format"), settings.llama_format),
    )


def _assistant(entry: Entry, draft: str | None, settings: BenchSettings) -> str | None:
    """The folder of the draft that transformers gets; without a name the one of our own speculative run."""
    if entry.name != "transformers_assisted":
        return None
    if draft is None:
        draft = _resolved(Entry(label=_DRAFTING_RUN, name=_DRAFTING_RUN), settings).speculation.draft.path
    if draft is None:
        raise ConfigError(
            f"systems: {shown(entry.label)} needs draft=FOLDER, made by python -m tools.distill"
        )
    folder = Path(draft).expanduser()
    if not is_draft_folder(folder):
        raise ConfigError(f"draft={shown_path(draft)}: expected a folder made by python -m tools.distill")
    return str(folder.resolve())


def _whole(entry: Entry, own: dict[str, str], key: str, default: int | None) -> int | None:
    if key not in own:
        return default
    if not own[key].isdecimal() or int(own[key]) < 1:
        raise ConfigError(f"systems: {shown(entry.label)}: {key}={shown(own[key])}: expected at least 1")
    return int(own[key])


def _llama_format(entry: Entry, value: str | None, default: LlamaFormat) -> LlamaFormat:
    if value is None:
        return default
    if value not in LlamaFormat.__members__:
        raise ConfigError(
            f"systems: {shown(entry.label)}: llama_format={shown(value)}: expected one of "
            f"{', '.join(LlamaFormat.__members__)}"
        )
    return LlamaFormat[value]


def _check_cores(setups: Sequence[SetUp]) -> None:
    if SetUp.same_target_cores in setups and len(usable_cores()) < 2:
        raise ConfigError(
            f"setups={SetUp.same_target_cores.value}: expected at least 2 usable cores, one for the target "
            f"and one for the draft, got 1; choose setups={SetUp.same_total_cores.value}"
        )


def _encode(texts: Sequence[PromptText], folder: Path, settings: BenchSettings) -> list[PlannedPrompt]:
    encoder = PromptEncoder(folder)
    is_chat = read_tokenizer_settings(folder).chat_template is not None
    prompts = []
    for number, prompt in enumerate(texts):
        chat = [ChatTurn(role="user", content=prompt.text)] if is_chat else None
        try:
            token_ids = encoder.encode_request(prompt=None if is_chat else prompt.text, chat=chat)
        except RequestError as error:
            raise ConfigError(f"{prompt.origin}: {error}") from None
        question = Question(
            text=prompt.text,
            is_chat=is_chat,
            prompt_token_ids=token_ids,
            max_tokens=settings.max_tokens,
            seed=settings.seed + number,
        )
        prompts.append(PlannedPrompt(set_name=prompt.set_name, index=prompt.index, question=question))
    return prompts


def _longest_context(plain: RunConfig, folder: Path) -> int:
    if plain.model.is_emulated:
        return plain.model.max_context
    return min(plain.model.max_context, read_shape(folder).max_position)


def _check_lengths(prompts: Sequence[PlannedPrompt], texts: Sequence[PromptText], limit: int) -> None:
    """An answer that is cut off by the context would be cut elsewhere by every system."""
    for prompt, text in zip(prompts, texts, strict=True):
        num_tokens = len(prompt.question.prompt_token_ids)
        if num_tokens + prompt.question.max_tokens > limit:
            raise ConfigError(
                f"{text.origin}: {num_tokens} prompt tokens and max_tokens={prompt.question.max_tokens} are "
                f"more than the context of {limit}; lower max_tokens or leave the prompt out"
            )
