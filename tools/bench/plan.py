"""From settings to what will be run: every system with its worker's specification, every prompt with its ids.

Everything that the user can mend is found here, before a worker starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from conf.check import check
from conf.compose import compose
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
    """One system and what its worker is told."""

    entry: Entry
    spec: WorkerSpec

    @property
    def label(self) -> str:
        """What it is called."""
        return self.entry.label


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

    def system(self, label: str) -> PlannedSystem:
        """The one of that label."""
        return next(system for system in self.systems if system.label == label)

    def identity(self) -> dict[str, Any]:
        """All that an answer and its time depend on; how often each is repeated is not among it."""
        prompts = [(prompt.set_name, prompt.index, prompt.question) for prompt in self.prompts]
        return {
            "setup": self.settings.setup.value,
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
    _check_cores(settings.setup)
    plain = _resolved(Entry(label=PLAIN_RUN, name=PLAIN_RUN), settings)
    assert plain.model.path is not None, "it is resolved"
    folder = Path(plain.model.path)
    prompts = _encode(texts, folder, settings)
    _check_lengths(prompts, texts, folder, plain.model.max_context)
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
    return Plan(settings=settings, folder=folder, systems=systems, baseline=baseline, prompts=prompts)


def _resolved(entry: Entry, settings: BenchSettings) -> RunConfig:
    """The run's configuration, as `python -m pipeline.run` would have it, with local models."""
    placement = _PLACEMENTS[settings.setup]
    arguments = [
        f"conf={entry.name}",
        f"placement={placement.name}",
        f"model.dtype={settings.dtype.name}",
        f"max_tokens={settings.max_tokens}",
        f"temperature={settings.temperature!r}",
        *entry.overrides,
    ]
    if placement.target_cores is not None:
        arguments.append(f"placement.target_cores={placement.target_cores}")
    if settings.model is not None:
        arguments.append(f"model.path={settings.model}")
    try:
        config = compose(arguments)
        check(config)
        return resolve_models(config)
    except ConfigError as error:
        where = f"systems: {shown(entry.label)}: " if entry.overrides else ""
        raise ConfigError(where + str(error).replace("model.path=", "model=")) from None


def _peer_spec(entry: Entry, settings: BenchSettings, folder: Path, *, max_context: int) -> PeerSpec:
    own = dict(override.partition("=")[::2] for override in entry.overrides)
    return PeerSpec(
        name=entry.name,
        folder=str(folder),
        dtype=settings.dtype,
        cores=list(plan_cores(_PLACEMENTS[settings.setup], usable_cores()).target),
        max_context=max_context,
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


def _check_cores(setup: SetUp) -> None:
    if setup is SetUp.same_target_cores and len(usable_cores()) < 2:
        raise ConfigError(
            f"setup={setup.value}: expected at least 2 usable cores, one for the target and one for the "
            f"draft, got 1; choose setup={SetUp.same_total_cores.value}"
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
            temperature=settings.temperature,
            seed=settings.seed + number,
        )
        prompts.append(PlannedPrompt(set_name=prompt.set_name, index=prompt.index, question=question))
    return prompts


def _check_lengths(
    prompts: Sequence[PlannedPrompt], texts: Sequence[PromptText], folder: Path, max_context: int
) -> None:
    """An answer that is cut off by the context would be cut elsewhere by every system."""
    limit = min(max_context, read_shape(folder).max_position)
    for prompt, text in zip(prompts, texts, strict=True):
        num_tokens = len(prompt.question.prompt_token_ids)
        if num_tokens + prompt.question.max_tokens > limit:
            raise ConfigError(
                f"{text.origin}: {num_tokens} prompt tokens and max_tokens={prompt.question.max_tokens} are "
                f"more than the context of {limit}; lower max_tokens or leave the prompt out"
            )
