"""The keys of `python -m tools.bench`, and the rules that they must keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from conf.limits import MAX_SEED, MAX_TEMPERATURE
from conf.schema import DType
from conf.schema_file import check_known, compose_schema, parse_arguments
from pipeline.errors import ConfigError, shown, shown_path

_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "bench"
_VERBATIM_KEYS = (
    "systems", "prompts", "out", "model", "draft", "baseline", "setups", "temperatures", "batch_sizes",
)  # fmt: skip
_MAX_BATCH_SIZE = 256
_MAX_SECONDS = 1_000_000
_T = TypeVar("_T")


class SetUp(str, Enum):
    """Which cores each system gets."""

    same_target_cores = "same_target_cores"
    same_total_cores = "same_total_cores"

    @property
    def meaning(self) -> str:
        """What it gives to whom, for reports."""
        return _MEANINGS[self]


_MEANINGS = {
    SetUp.same_target_cores: "every target computes on one core, the same one; the draft of ours has the "
    "other cores to itself, which plain decoding and the peers leave idle",
    SetUp.same_total_cores: "everything may use all cores: plain decoding and the peers compute on all of "
    "them, target and draft of ours share them",
}


class LlamaFormat(str, Enum):
    """Number format of the weights that llama.cpp gets."""

    bf16 = "bf16"
    q8_0 = "q8_0"


@dataclass
class BenchSettings:
    """All keys."""

    out: str = ""
    """Needed: the folder of report.html, table.md, results.json, pictures and answers.jsonl. The same command
    goes on from there, also with more repeats, temperatures, batch sizes or set-ups."""
    systems: str = "autoregressive,speculative,ssd,saguaro,transformers"
    """Comma-separated entries NAME or LABEL=NAME, each with any number of +key=value. NAME is a named run, or
    one of the peers transformers, transformers_lookup, transformers_assisted, llama_cpp, vllm, sglang."""
    baseline: str | None = None
    """Label that speeds and tokens are compared with. Null: the first entry of the run autoregressive."""
    setups: str = "same_target_cores,same_total_cores"
    """Comma-separated: which cores each system gets. `same_target_cores`: every target one core, the same,
    our drafts the others; `same_total_cores`: everything all of them."""
    temperatures: str = "0"
    """Comma-separated; 0 is greedy."""
    batch_sizes: str = "1"
    """Comma-separated: requests asked at once. The peers of transformers and llama_cpp take one at a time."""

    prompts: str | None = None
    """Comma-separated .jsonl or .jsonl.gz files, a set each: `turns`, `prompt` or `question` a line; of
    several turns the first. `built-in` among them, or null: the tool's own set."""
    num_prompts: int | None = None
    """First so many of each set. Null: all."""
    repeats: int = 2
    """How often each system answers each prompt, each time in a process started anew: one that was lucky with
    its memory can be a tenth faster for all its life."""
    max_tokens: int = 128
    """Most tokens of an answer."""
    seed: int = 1
    """Of the first prompt; the next ones count on."""

    model: str | None = None
    """The target: Hugging Face id, folder, .gguf file, or an emulated model by its name (then of the systems
    only ours). Null: the built-in demo model."""
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
    """A system that takes longer for one batch of answers is given up."""

    @property
    def setup_list(self) -> list[SetUp]:
        """`setups`, read. Raises `ConfigError`, like the two below."""
        return _listed("setups", self.setups, SetUp, f"some of {', '.join(SetUp.__members__)}")

    @property
    def temperature_list(self) -> list[float]:
        """`temperatures`, read."""
        return _listed(
            "temperatures", self.temperatures, _temperature, f"numbers from 0 to {MAX_TEMPERATURE}"
        )

    @property
    def batch_size_list(self) -> list[int]:
        """`batch_sizes`, read."""
        expects = f"whole numbers from 1 to {_MAX_BATCH_SIZE}"
        return _listed("batch_sizes", self.batch_sizes, _batch_size, expects)


def compose_settings(arguments: Sequence[str]) -> BenchSettings:
    """Compose `key=value` arguments. Raises `ConfigError`."""
    given = parse_arguments(arguments, example="max_tokens=64")
    check_known(given, BenchSettings)
    settings = compose_schema(
        BenchSettings, folder=_FOLDER, file="config", given=given, verbatim=_VERBATIM_KEYS
    )
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
        if not 0 < getattr(settings, key) <= _MAX_SECONDS:
            raise ConfigError(
                f"{key}={getattr(settings, key)}: expected a positive number of seconds, at most "
                f"{_MAX_SECONDS}"
            )
    for listed in ("setup_list", "temperature_list", "batch_size_list"):
        getattr(settings, listed)
    if not 0 <= settings.seed <= MAX_SEED // 2:
        raise ConfigError(f"seed={settings.seed}: expected 0 to {MAX_SEED // 2}")
    if Path(settings.out).is_file():
        raise ConfigError(f"out={shown_path(settings.out)} is a file, expected a folder; choose another")


def _listed(key: str, text: str, read: Callable[[str], _T], expects: str) -> list[_T]:
    """The values of a comma-separated text. read: raises `ValueError` for a part that is none."""
    values: list[_T] = []
    for part in text.split(","):
        try:
            value = read(part.strip())
        except ValueError:
            raise ConfigError(f"{key}={shown(text)}: expected {expects}, got {shown(repr(part))}") from None
        if value in values:
            raise ConfigError(f"{key}={shown(text)}: {shown(part.strip())} comes twice; leave one out")
        values.append(value)
    return values


def _temperature(text: str) -> float:
    if not 0 <= (value := float(text)) <= MAX_TEMPERATURE:  # which NaN is not either
        raise ValueError(text)
    return value


def _batch_size(text: str) -> int:
    if not 1 <= (value := int(text)) <= _MAX_BATCH_SIZE:
        raise ValueError(text)
    return value
