"""The keys of `python -m tools.bench`, and the rules that they must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from conf.limits import MAX_SEED, MAX_TEMPERATURE
from conf.schema import DType
from conf.schema_file import check_known, compose_schema, parse_arguments
from pipeline.errors import ConfigError, shown_path

_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "bench"
_VERBATIM_KEYS = ("systems", "prompts", "out", "model", "draft", "baseline")
"""Values taken as they stand: they hold what Hydra's grammar gives a meaning to."""


class SetUp(str, Enum):
    """Which cores each system gets."""

    same_target_cores = "same_target_cores"
    """Every target one core, the same one; our drafts have the other cores, peers nothing but the one."""
    same_total_cores = "same_total_cores"
    """Everything all cores."""


class LlamaFormat(str, Enum):
    """Number format of the weights that llama.cpp gets."""

    bf16 = "bf16"
    q8_0 = "q8_0"


@dataclass
class BenchSettings:
    """All keys."""

    out: str = ""
    """Needed: the folder of results.json, table.md and answers.jsonl. The same command goes on from there."""
    systems: str = "autoregressive,speculative,ssd,saguaro,transformers"
    """Comma-separated entries NAME or LABEL=NAME, each with any number of +key=value. NAME is a named run, or
    one of the peers transformers, transformers_lookup, transformers_assisted, llama_cpp."""
    baseline: str | None = None
    """Label that speeds and tokens are compared with. Null: the first entry of the run autoregressive."""
    setup: SetUp = SetUp.same_target_cores
    """Which cores each system gets."""

    prompts: str | None = None
    """Comma-separated .jsonl files, a set each: `turns`, `prompt` or `question` a line; of several turns the
    first. Null: the tool's own set."""
    num_prompts: int | None = None
    """First so many of each set. Null: all."""
    repeats: int = 3
    """How often each system answers each prompt."""
    max_tokens: int = 128
    """Most tokens of an answer."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 1
    """Of the first prompt; the next ones count on."""

    model: str | None = None
    """The target: Hugging Face id, folder or .gguf file. Null: the built-in demo model."""
    dtype: DType = DType.bfloat16
    """Of our forward and of transformers'."""
    draft: str | None = None
    """Folder of python -m tools.distill for transformers_assisted. Null: the draft of our run speculative.
    Ours take another one as +speculation.draft.path=FOLDER."""
    assistant_tokens: int | None = None
    """Draft tokens a round of transformers_assisted. Null: what transformers does by default."""
    lookup_tokens: int = 10
    """Most tokens a round of transformers_lookup."""
    llama_format: LlamaFormat = LlamaFormat.bf16
    """Weights of llama_cpp."""

    mix_sources: bool = False
    """Go on in OUT although the engine's source has changed since; the report says so."""
    load_timeout_s: float = 900.0
    """A system that takes longer to load is given up."""
    answer_timeout_s: float = 600.0
    """A system that takes longer for one answer is given up."""


def compose_settings(arguments: Sequence[str]) -> BenchSettings:
    """Compose `key=value` arguments. Raises `ConfigError`."""
    given = parse_arguments(arguments, example="max_tokens=64")
    check_known(given, BenchSettings)
    verbatim = {key: given.pop(key) for key in _VERBATIM_KEYS if key in given}
    settings = compose_schema(BenchSettings, folder=_FOLDER, file="config", given=given)
    for key, value in verbatim.items():
        is_null = value == "null" and getattr(settings, key) is None
        setattr(settings, key, None if is_null else value)
        if not value.strip():
            raise ConfigError(f"{key}= is empty; give it a value or leave it out")
    if not settings.out:
        raise ConfigError("out is missing: expected out=FOLDER")
    _check(settings)
    return settings


def _check(settings: BenchSettings) -> None:
    for key in ("repeats", "max_tokens", "lookup_tokens", "num_prompts", "assistant_tokens"):
        value = getattr(settings, key)
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value}: expected at least 1; raise it")
    for key in ("load_timeout_s", "answer_timeout_s"):
        if not getattr(settings, key) > 0:
            raise ConfigError(f"{key}={getattr(settings, key)}: expected a positive number of seconds")
    if not 0 <= settings.temperature <= MAX_TEMPERATURE:
        raise ConfigError(f"temperature={settings.temperature}: expected 0 to {MAX_TEMPERATURE}; 0 is greedy")
    if not 0 <= settings.seed <= MAX_SEED // 2:
        raise ConfigError(f"seed={settings.seed}: expected 0 to {MAX_SEED // 2}")
    if Path(settings.out).is_file():
        raise ConfigError(f"out={shown_path(settings.out)} is a file, expected a folder; choose another")
