"""How often each rule of verification accepts a draft token, on the same contexts.

    python -m tools.acceptance [num_prompts=8] [max_tokens=64] [noise_seeds=32] [temperatures=0.3,0.7,1]
                               [prompts=FILE.jsonl] [key=value of a run: conf=..., model.path=..., top_p=...]

The target answers the prompts (the bench's own, or a file of the same form) at each temperature. Before every
token of an answer, target and draft say their laws p and q of what comes next, filters applied, and then:

- coupled: the probability that the arg-maxes of log p + g and log q + g agree, g being shared Gumbel noise;
  measured with `noise_seeds` draws of g, the same for all contexts of one answer;
- rejection: sum of min(p, q), exactly; Saguaro sampling would lower it;
- the least that coupling can give for these laws, the mean of (1 - TV) / (1 + TV) (arXiv 2408.07978).

A context counts once, whatever was accepted before it. Prints a Markdown table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from conf.check import check
from conf.compose import compose
from conf.schema import DraftKind, RunConfig, Verification
from kernels.noise import Stream, gumbel_noise_for_seeds, stream_seed
from pipeline.errors import ConfigError, EngineError
from pipeline.messages import BeginDraft, ChatTurn, Sampling
from pipeline.model_source import resolve_models
from pipeline.tokenizer_settings import read_tokenizer_settings
from stages.draft_speculator.draft_source import DraftSource, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree
from stages.draft_speculator.drawn_tokens import DrawnTokens
from stages.draft_speculator.load_source import load_source
from stages.model.token_law import TokenLaw
from stages.model.weights import load_model
from stages.tokenizer import PromptEncoder
from tools.bench.prompts import read_sets
from tools.distill.runner_decoder import RunnerDecoder

_DEFAULTS = {
    "num_prompts": "8",
    "max_tokens": "64",
    "noise_seeds": "32",
    "temperatures": "0.3,0.7,1",
    "prompts": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sampled answer, and the target's law before each of its tokens."""

    prompt: list[int]
    token_ids: list[int]
    laws: Tensor
    """[tokens, V] probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of the contexts of one answer: each field [tokens]."""

    coupled: Tensor
    rejection: Tensor
    least_coupled: Tensor


def rates_of(target_probs: Tensor, draft_probs: Tensor, noise: Tensor) -> Rates:
    """Acceptance of one draft token under both rules.

    target_probs, draft_probs: [T, V], rows that sum to 1. noise: [S, V], standard Gumbel.
    """
    overlap = torch.minimum(target_probs, draft_probs).sum(dim=-1)
    agreed = torch.zeros_like(overlap)
    for row in noise:
        choices = [(probs.log() + row).argmax(dim=-1) for probs in (target_probs, draft_probs)]
        agreed += choices[0] == choices[1]
    # sum of min(p, q) is 1 - TV.
    return Rates(coupled=agreed / len(noise), rejection=overlap, least_coupled=overlap / (2 - overlap))


def write_answers(
    decoder: RunnerDecoder, prompts: Sequence[list[int]], sampling: Sampling, *, vocab_size: int
) -> list[Answer]:
    """Sample `max_tokens` tokens for every prompt. The decoder has a row for each."""
    laws = [
        TokenLaw(replace(sampling, seed=sampling.seed + row), torch.arange(vocab_size))
        for row in range(len(prompts))
    ]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens: list[list[int]] = [[] for _ in prompts]
    probs: list[list[Tensor]] = [[] for _ in prompts]
    rows = range(len(prompts))
    logits = decoder.read(prompts, rows, rows)
    while True:
        for row, law in enumerate(laws):
            log_law = law.log_law(logits[row : row + 1])
            probs[row].append(log_law[0].softmax(dim=-1))
            position = len(prompts[row]) + len(tokens[row])
            tokens[row].append(int((log_law[0] + law.noise(position, log_law.dtype)).argmax()))
            law.forget_before(position + 1)
        if len(tokens[0]) == sampling.max_tokens:
            break
        logits = decoder.step(torch.tensor([one[-1] for one in tokens]), lengths)
        lengths = lengths + 1
    return [
        Answer(prompt=prompt, token_ids=one, laws=torch.stack(law))
        for prompt, one, law in zip(prompts, tokens, probs, strict=True)
    ]


def draft_laws(source: DraftSource, answer: Answer, sampling: Sampling) -> Tensor:
    """The draft's law before each token of an answer, [tokens, V] over the target's ids."""
    assert source.law_token_ids is not None, "a draft that draws has laws"
    num_tokens = len(answer.token_ids)
    request = BeginDraft(
        request_id="answer",
        prompt_token_ids=answer.prompt,
        sampling=sampling,
        max_len=len(answer.prompt) + num_tokens,
    )
    source.begin(request, max_nodes=num_tokens)
    tree = DraftTree(answer.prompt)
    node = tree.root
    for token in answer.token_ids[:-1]:
        node = tree.add(token, node)
    source.extend([ExtendJob(request_id="answer", tree=tree, nodes=list(range(len(tree))))])
    following = tree.next_tokens[tree.root :]
    source.end("answer")
    weights = torch.stack([tokens.weights for tokens in following if isinstance(tokens, DrawnTokens)])
    ids = torch.tensor(source.law_token_ids)
    return torch.zeros_like(answer.laws).index_copy_(1, ids, weights.to(answer.laws.dtype))


def measure(
    config: RunConfig, prompts: Sequence[list[int]], temperatures: Sequence[float], *, seeds: int
) -> str:
    """The table. config: resolved, with a draft that has laws."""
    assert config.model.path is not None, "it is resolved"
    target = load_model(config.model.path, dtype=getattr(torch, config.model.dtype.value))
    longest = max(len(prompt) for prompt in prompts) + config.max_tokens
    decoder = RunnerDecoder(target, num_rows=len(prompts), num_slots=longest)
    source = load_source(config)
    vocab_size = target.shape.vocab_size
    lines = [
        "| temperature | contexts | coupled | rejection | least of coupled |",
        "|---|---|---|---|---|",
    ]
    for temperature in temperatures:
        sampling = Sampling(
            max_tokens=config.max_tokens,
            temperature=temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            seed=config.seed or 0,
        )
        rates = []
        for answer in write_answers(decoder, prompts, sampling, vocab_size=vocab_size):
            noise_seeds = torch.tensor([stream_seed(seed, Stream.PROPOSAL) for seed in range(seeds)])
            noise = gumbel_noise_for_seeds(noise_seeds, len(answer.prompt), torch.arange(vocab_size))
            rates.append(
                rates_of(answer.laws, draft_laws(source, answer, sampling), noise.to(answer.laws.dtype))
            )
        columns = [
            torch.cat([getattr(one, name) for one in rates]).double()
            for name in ("coupled", "rejection", "least_coupled")
        ]
        means = " | ".join(f"{float(column.mean()):.3f}" for column in columns)
        lines.append(f"| {temperature:g} | {len(columns[0])} | {means} |")
    return "\n".join(lines)


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    own, rest = dict(_DEFAULTS), []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and key in own:
            own[key] = value
        else:
            rest.append(argument)
    return own, rest


def _numbers(own: dict[str, str], key: str, kind: type[int] | type[float]) -> list[int] | list[float]:
    """The positive numbers of an own key, separated by commas. Raises `ConfigError`."""
    try:
        numbers = [kind(part) for part in own[key].split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise ConfigError(f"{key}={own[key]}: expected numbers above 0, such as {_DEFAULTS[key]}")
    return numbers


def _prompts(own: dict[str, str], folder: Path) -> list[list[int]]:
    encoder = PromptEncoder(folder)
    is_chat = read_tokenizer_settings(folder).chat_template is not None
    encoded = []
    for text in read_sets(own["prompts"] or None, num_prompts=int(_numbers(own, "num_prompts", int)[0])):
        chat = [ChatTurn(role="user", content=text.text)] if is_chat else None
        encoded.append(encoder.encode_request(prompt=None if is_chat else text.text, chat=chat))
    return encoded


def main(arguments: Sequence[str]) -> int:
    """The command; the exit status is 2 for a mistake in the arguments."""
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(__doc__)
        return 0
    try:
        own, rest = _split(arguments)
        temperatures = _numbers(own, "temperatures", float)
        if not any(argument.startswith("conf=") for argument in rest):
            rest = ["conf=speculative", *rest]
        config = compose([*rest, f"max_tokens={int(_numbers(own, 'max_tokens', int)[0])}"])
        check(config)
        config.speculation.verification = Verification.rejection  # so that the draft says its laws
        config.speculation.tree.nodes = None
        config.speculation.saguaro_c = None
        config = resolve_models(config)
        if config.speculation.draft.kind not in (DraftKind.model, DraftKind.layers) or not config.model.path:
            raise ConfigError(
                f"speculation.draft.kind={config.speculation.draft.kind.name}: expected model or layers, a "
                "draft with a law of its own; give speculation.draft.path=ID|FOLDER|FILE.gguf"
            )
        prompts = _prompts(own, Path(config.model.path))
        print(measure(config, prompts, temperatures, seeds=int(_numbers(own, "noise_seeds", int)[0])))
    except EngineError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
