"""The shape of a run's configuration: one dataclass a group, a docstring per field.

Hydra composes YAML into these (see `conf.compose`); rules that span fields are in `conf.check`. Not
frozen, because OmegaConf refuses every override of a frozen schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class DType(str, Enum):
    """Number format of weights and activations."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


class CpuKernels(str, Enum):
    """What multiplies on a CPU."""

    auto = "auto"
    """Ours where the CPU, the model and a C compiler allow, else PyTorch's."""
    native = "native"
    """Ours, or an error that says why not."""
    torch = "torch"
    """PyTorch's."""


class WeightFormat(str, Enum):
    """What the matrices of a model are rounded to when it is loaded."""

    dtype = "dtype"
    """`model.dtype`."""
    int8 = "int8"
    """int8 with a scale a row, through the C kernels: half the memory to read for a step."""


class DraftKind(str, Enum):
    """What guesses tokens."""

    none = "none"
    """Nothing: plain autoregressive decoding."""
    auto = "auto"
    """For the built-in demo model the draft that comes with it, for any other model `ngram`."""
    model = "model"
    """Another model with the same vocabulary, `draft.path`."""
    layers = "layers"
    """The target's own first `draft.layers` layers and its head."""
    ngram = "ngram"
    """Look-up of the last few tokens in prompt and output."""


class FanOut(str, Enum):
    """How the branch budget is shared between the outcomes."""

    uniform = "uniform"
    geometric = "geometric"
    calibrated = "calibrated"


class Backup(str, Enum):
    """What drafts after a miss."""

    sequential = "sequential"
    """The draft, while the target waits; nothing where others of the batch hit: then the request decodes
    plainly for a round, and the draft prepares again."""
    ngram = "ngram"
    """Look-up in prompt and output, or nothing: the target verifies at once, and the draft prepares again."""
    random = "random"
    """Random tokens of the text so far: a yardstick for the others."""
    auto = "auto"
    """The draft where what a step wins is worth its measured time to all requests that wait, else look-up, as
    where others of the batch hit and the plan is fixed."""


class Verification(str, Enum):
    """The rule by which the target accepts proposed tokens."""

    coupled = "coupled"
    """A proposed token is accepted if it is the one that the target draws; both draw with the same noise."""
    rejection = "rejection"
    """A token that the draft drew is accepted with probability min(1, p / q)."""


class PlanMode(str, Enum):
    """Whether depth, tree and budget are chosen online."""

    fixed = "fixed"
    """As configured."""
    auto = "auto"
    """By measured times, acceptance and speed; what is configured is the most that is used."""


@dataclass
class EmulatedConfig:
    """Laws and times of emulated models, `model=emulated` and its like; see `stages.model.emulated_law`.

    A time table is two lists: so many tokens in a forward, all requests together, last so many ms. Between
    its entries it is interpolated, beyond the last extrapolated, before the first constant.
    """

    target_rows: list[int] = field(default_factory=lambda: [1, 128])
    """Tokens in a forward of the target, ascending; a proposal of K is K + 1 of them."""
    target_ms: list[float] = field(default_factory=lambda: [15.0, 20.0])
    """What such a forward lasts."""
    draft_rows: list[int] = field(default_factory=lambda: [1, 128])
    """Tokens in a step of the draft, ascending; a step of B branches is B of them."""
    draft_ms: list[float] = field(default_factory=lambda: [2.0, 3.0])
    """What such a forward lasts."""
    time_scale: float = 1.0
    """All times are multiplied by it; 0: as fast as they can be computed."""
    vocab_size: int = 1024
    """Token ids of both models; the first 256 are bytes."""
    seed: int = 1
    """Of both laws; another seed is another pair of models."""
    easy_acceptance: float = 0.975
    """How often the draft's best token is the target's best (temperature 0), in easy stretches of text."""
    hard_acceptance: float = 0.7
    """The same in hard stretches."""
    easy_share: float = 0.75
    """Share of the tokens that lie in easy stretches."""
    easy_stretch: float = 40.0
    """Mean length of an easy stretch, in tokens. That of a hard one follows from the share."""
    spread: float = 0.8
    """How unequal the tokens of one stretch are. More makes the bonus after a rejection harder to predict."""
    draft_error: float = 1.0
    """Size of the error of the draft's logits, and with it of the target's gaps: acceptance and hits at
    temperature 0 stay as they are, at temperature 1 less means flatter laws."""
    draft_blindness: float = 0.6
    """Share of the target's candidates, its best left out, for which the draft has other tokens. Changes
    nothing at temperature 0; at temperature 1 more means fewer hits."""


@dataclass
class ModelConfig:
    """The target model."""

    name: str = "demo"
    """Which file of the `model` group this is: `demo` (built in), `custom` (`model.path` names it) or one of
    the emulated ones."""
    path: str | None = None
    """Hugging Face id, local folder, or .gguf file. None: the built-in demo model."""
    dtype: DType = DType.bfloat16
    """Format the forward runs in, target and draft alike."""
    cpu_kernels: CpuKernels = CpuKernels.auto
    """What multiplies on a CPU: our C kernels (bfloat16, compiled on first use) or PyTorch's operators."""
    weights: WeightFormat = WeightFormat.dtype
    """Format of the target's matrices. int8 is a law of its own: exact, but not the bfloat16 model's."""
    max_context: int = 8192
    """Most tokens (prompt and output) of one request; cut to what the model supports."""
    emulated: EmulatedConfig = field(default_factory=EmulatedConfig)

    @property
    def is_emulated(self) -> bool:
        """Whether target and draft are emulated: cheap laws, and forwards that last what a table says."""
        return self.name.startswith("emulated")


@dataclass
class PlacementConfig:
    """Which cores each stage owns. Core numbers count within the cores this process may use."""

    name: str = "cpu_split"
    """`cpu_split`: the target has cores of its own. `cpu_shared`: everything may use every core."""
    target_cores: int | None = None
    """Cores of the target. None: `cpu_split` half of the cores, at least one; `cpu_shared` all."""
    draft_cores: int | None = None
    """Cores shared by the draft and the small stages. None: the remaining cores, or all."""
    page_size: int = 16
    """Tokens in one page of the KV caches."""
    prefill_chunk: int = 128
    """Most prompt tokens that target and draft read in one forward. A longer prompt takes several, between
    which running requests go on: more tokens read it sooner, and keep the others waiting longer."""
    kv_memory: str = "auto"
    """Memory of the KV caches of target and draft together: a size such as 2GiB, or a share of the machine's
    such as 0.25. Requests share it. auto: `max_requests` of `model.max_context`, but at most a half."""
    prefix_cache: bool = True
    """Keep the KV of earlier requests while there is room, for later ones that begin with the same tokens,
    such as the next turn of a chat. Tokens are kept by whole pages."""


@dataclass
class TreeConfig:
    """Shape of the proposals. Neither `widths` nor `nodes`: a chain of `speculation.depth` tokens."""

    widths: list[int] | None = None
    """A fixed shape: how many children a node has, one number for each level."""
    nodes: int | None = None
    """Best first: the so many likeliest nodes, up to `speculation.depth` levels deep."""
    rows: int | None = None
    """Most nodes that the draft reads in one step, all branches of a request together, the likeliest first.
    None: 8 for best first, else all."""


@dataclass
class DraftConfig:
    """The draft."""

    kind: DraftKind = DraftKind.none
    """What guesses tokens: another model, the target's first layers, a look-up in the text, or nothing."""
    path: str | None = None
    """For kind `model`: Hugging Face id, local folder, or .gguf file."""
    layers: int | None = None
    """For kind `layers`: how many of the target's first layers to keep."""
    look_up: int = 0
    """Tokens looked up in prompt and output that each proposal may hold beside the draft's, in one tree."""
    weights: WeightFormat = WeightFormat.int8
    """Format of the draft's matrices; without the C kernels it is `model.dtype`. No answer depends on it."""


@dataclass
class SpeculationConfig:
    """How tokens are guessed and outcomes are prepared."""

    prepare_outcomes: bool = False
    """Draft continuations of the likely outcomes while the target verifies (SSD)."""
    depth: int = 4
    """K: tokens in a drafted chain."""
    min_path_prob: float = 0.0
    """While the target waits, the draft reads on only below nodes whose path it gives this probability. With
    plan=auto only until the planner has measured enough to weigh each step itself."""
    budget: int = 16
    """B: outcomes prepared per round and request."""
    fan_out: FanOut = FanOut.uniform
    """How the budget is shared between the outcomes."""
    backup: Backup = Backup.sequential
    """What drafts after an outcome that was not prepared."""
    verification: Verification = Verification.coupled
    """The rule by which the target accepts proposed tokens: `coupled` returns the same tokens whatever drafts
    them, `rejection` (the paper's) keeps their law only."""
    saguaro_c: float | None = None
    """C of Saguaro sampling, 0 to 1, for the rejection rule: the draft's F likeliest tokens, those prepared
    as outcomes, are drawn with C times their weight. A smaller C: more hits, fewer accepted tokens. None and
    1: the draft's own law."""
    plan: PlanMode = PlanMode.fixed
    """Whether depth, tree, branches, and whether to speculate at all, are chosen online."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)


@dataclass
class StructuredOutputsConfig:
    """What every answer must be, with vLLM's names: at most one of the first five. Needs llguidance."""

    json: str | None = None
    """A JSON value of this schema, which is JSON text itself."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """All of the text matches this (syntax of Rust's regex crate, no look-around)."""
    choice: list[str] = field(default_factory=list)
    """One of these texts: a JSON list such as ["yes", "no"]."""
    grammar: str | None = None
    """A text of this grammar, in Lark's or GBNF notation."""
    disable_any_whitespace: bool = False
    """Of JSON: no free whitespace between its parts."""


@dataclass
class RunConfig:
    """Everything a run needs, after composition. The prompts are not part of it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    max_tokens: int = 128
    """Most tokens to generate per request."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps every token."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach top_p; 1 keeps every token."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest; 0 drops none."""
    seed: int | None = None
    """None: a fresh one per request, returned with the answer."""
    n: int = 1
    """Samples of each prompt. The first has the seed itself, the others seeds made from it."""
    min_tokens: int = 0
    """No end-of-sequence token, stop token or stop string ends an answer before it has so many tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, which is cut before them: one as it stands, or a JSON list such as
    ["\\n\\n", "END"]."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end an answer as end-of-sequence tokens do."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    presence_penalty: float = 0.0
    """-2 to 2, taken off the logits of tokens that the output holds."""
    frequency_penalty: float = 0.0
    """-2 to 2, taken off the logits of tokens for each time that the output holds them."""
    repetition_penalty: float = 1.0
    """Makes tokens that prompt or output hold less likely above 1, and likelier below."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """-100 to 100, added to the logits of tokens by id."""
    logprobs: int | None = None
    """Write to `output=` the log-probability of each token and of so many likeliest ones, by the model's own
    law: before bias, penalties, temperature and filters. At most 20."""
    echo: bool = False
    """Put the text of the prompt before the answer."""
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    chat: bool | None = None
    """Apply the model's chat template. None: if the model has one."""
    max_requests: int = 1
    """Requests that share each round."""
