"""The keys of `python -m tools.distill`, and the rules that they must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from conf.schema_file import check_known, compose_schema, parse_arguments
from pipeline.errors import ConfigError

_FOLDER = Path(__file__).resolve().parents[2] / "conf" / "distill"
PATH_KEYS = ("target", "out", "work", "prompts", "start_from")


class Step(str, Enum):
    """What is done, in this order."""

    write = "write"
    vocabulary = "vocabulary"
    train = "train"
    judge = "judge"
    save = "save"


class StoredDType(str, Enum):
    """How the draft's matrices are stored."""

    int8 = "int8"
    bfloat16 = "bfloat16"
    float32 = "float32"


@dataclass
class DistillSettings:
    """All keys."""

    target: str = ""
    """Needed: `demo`, a Hugging Face id, a folder or a .gguf file."""
    out: str = ""
    """Needed: the draft's folder; replaced when the step `save` is done."""
    work: str | None = None
    """Shards and checkpoints, kept. None: OUT.work beside it."""
    steps: list[Step] = field(default_factory=lambda: list(Step))
    """Steps to run, always in their order."""
    prompts: str | None = None
    """A .jsonl with `prompt` and maybe `source` a line; used beside the tool's own prompts."""
    threads: int = 1
    """CPU threads."""
    device: str = "cpu"
    """`cpu`, or a torch device such as `cuda`, for `write` and `train`."""
    seed: int = 1

    write_minutes: float = 25.0
    """`write` ends after this many minutes of this run..."""
    write_tokens: int = 10_000_000
    """...or when the work folder holds this many answer tokens."""
    batch_rows: int = 96
    """Answers written at once."""
    invented: int = 3000
    """User turns that the target invents."""
    own_prompts: int = 6000
    """Prompts from the tool's own templates and signatures."""
    max_prompt_tokens: int = 256
    """Longer prompts are left out."""
    max_answer_tokens: int = 160
    greedy_share: float = 0.5
    """Share of answers at temperature 0, in the first round over the prompts."""
    top_tokens: int = 16
    """Probabilities kept for each answer position."""

    head_size: int = 8192
    """Rows of the draft's head."""
    layers: list[int] = field(default_factory=list)
    """Target layers that the draft's layers start from. Empty: the first two and the last two."""
    start_from: str | None = None
    """A training checkpoint (or the work folder of another run) whose weights are the start."""
    train_minutes: float = 35.0
    """Of training, over all runs with this work folder; the learning rate follows it."""
    batch_tokens: int = 4096
    """Positions in one step, prompts and padding included."""
    learning_rate: float = 6e-4
    warmup_share: float = 0.04
    """Of the budget."""
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    token_weight: float = 0.1
    """Share of the loss that is cross-entropy on the committed token; the rest is KL to the target's law."""
    average_decay: float = 0.998
    """Of the moving average of the weights, a step; 0 for none."""
    checkpoint_minutes: float = 3.0

    depth: int = 6
    """Longest chain that `judge` rolls out."""
    judge_positions: int = 400
    """Held-out answer positions to roll out from."""
    target_ms: float | None = None
    """Measured time of a verification; with `step_ms` the table predicts tokens/s."""
    step_ms: float | None = None
    """Measured time of a draft step."""
    dtype: StoredDType = StoredDType.int8
    """Of the saved matrices."""

    @property
    def work_folder(self) -> Path:
        """Where shards and checkpoints are."""
        return Path(self.work) if self.work else Path(self.out).with_name(Path(self.out).name + ".work")


def compose_settings(arguments: Sequence[str]) -> DistillSettings:
    """Compose `key=value` arguments. Raises `ConfigError`."""
    given = parse_arguments(arguments, example="train_minutes=35")
    check_known(given, DistillSettings)
    for key in ("target", "out"):
        if not given.get(key, "").strip():
            raise ConfigError(f"{key} is missing: expected target=demo|ID|FOLDER|FILE.gguf and out=FOLDER")
    settings = compose_schema(DistillSettings, folder=_FOLDER, file="config", given=given, verbatim=PATH_KEYS)
    _check(settings)
    return settings


def _check(settings: DistillSettings) -> None:
    at_least_one = (
        "threads", "batch_rows", "max_prompt_tokens", "max_answer_tokens", "top_tokens", "head_size",
        "batch_tokens", "depth", "judge_positions",
    )  # fmt: skip
    for key in at_least_one:
        if getattr(settings, key) < 1:
            raise ConfigError(f"{key}={getattr(settings, key)}: expected at least 1; raise it")
    positive = ("write_minutes", "train_minutes", "learning_rate", "checkpoint_minutes", "max_gradient_norm")
    for key in positive:
        if not getattr(settings, key) > 0:
            raise ConfigError(f"{key}={getattr(settings, key)}: expected a positive number")
    for key in ("greedy_share", "token_weight", "average_decay", "warmup_share"):
        if not 0 <= getattr(settings, key) <= 1:
            raise ConfigError(f"{key}={getattr(settings, key)}: expected a number from 0 to 1")
    if not settings.steps:
        raise ConfigError(f"steps=[]: expected some of {', '.join(step.value for step in Step)}")
    if settings.prompts is not None and not Path(settings.prompts).is_file():
        raise ConfigError(f"prompts={settings.prompts}: there is no such file; expected a .jsonl")
