"""Tiny models, scripted drafts and the plain reference that the exactness tests compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from conf.schema import DraftKind, DType, FanOut, RunConfig, TreeConfig
from kernels.noise import gumbel_noise
from kernels.sampling import choose_coupled, sampling_law
from pipeline.inprocess import InProcess
from pipeline.messages import (
    BeginDraft,
    Committed,
    DetokenizerMessage,
    Sampling,
    StageName,
    TokenizedRequest,
)
from pipeline.stage import Stage, StageContext
from stages.draft_speculator.draft_source import DraftSource, Drawing, ExtendJob
from stages.draft_speculator.draft_tree import DraftTree, Rerooting
from stages.draft_speculator.model_draft import ModelDraft
from stages.draft_speculator.ngram_draft import Continuations, NgramDraft
from stages.draft_speculator.stage import DraftSpeculator
from stages.grammar import GrammarCompiler
from stages.incremental_text import TextDecoder
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.runner import ModelRunner
from stages.model.shape import ModelShape, parse_shape
from stages.model.weights import LoadedModel, random_model
from stages.outcome_predictor.stage import OutcomePredictor
from stages.target_verifier.stage import TargetVerifier

VOCAB_SIZE = 128
EOS = 5


def tiny_shape(*, vocab_size: int = VOCAB_SIZE, max_position: int = 256) -> ModelShape:
    """Two layers, hidden size 64, grouped heads."""
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    return parse_shape(config, {}, origin="tiny")


def tiny_target(*, seed: int = 1, dtype: torch.dtype = torch.float64, max_position: int = 256) -> LoadedModel:
    """The target of the exactness tests."""
    return random_model(tiny_shape(max_position=max_position), seed=seed, dtype=dtype)


def mixed_model(target: LoadedModel, *, share: float, seed: int = 7) -> LoadedModel:
    """A draft that agrees with the target some of the time: its head is moved away by `share`."""
    generator = torch.Generator().manual_seed(seed)
    head = target.weights.head
    noise = torch.randn(head.shape, generator=generator, dtype=torch.float64).to(head.dtype)
    moved = head * (1 - share) + noise * head.std() * share
    return replace(target, weights=replace(target.weights, head=moved))


def tiny_runner(model: LoadedModel, *, page_size: int = 16, num_slots: int = 4096) -> ModelRunner:
    """A runner with room for a few requests."""
    return ModelRunner(
        shape=model.shape,
        weights=model.weights,
        num_slots=num_slots,
        page_size=page_size,
        dtype=model.weights.embed.dtype,
    )


class PlainDecoder:
    """The reference: the whole sequence is forwarded anew for every token; no cache, no speculation."""

    def __init__(self, model: LoadedModel) -> None:
        self._runner = tiny_runner(model)
        self._vocab_ids = torch.arange(model.shape.vocab_size)

    def law(self, tokens: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """Log law [1, V] of the token after `tokens`."""
        size = len(tokens)
        handle = self._runner.kv.allocate(size)
        rows = SequenceRows(kv=handle, prefix_len=0, write_slots=list(range(size)), tail_len=size, mask=None)
        logits = self._runner.forward(
            ForwardBatch(
                token_ids=list(tokens), positions=list(range(size)), sequences=[rows], logit_rows=[size - 1]
            )
        )
        self._runner.kv.free(handle)
        return sampling_law(
            logits,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )

    def generate(self, prompt: Sequence[int], sampling: Sampling, *, max_context: int = 256) -> list[int]:
        """Output tokens, the end-of-sequence token included."""
        tokens = list(prompt)
        while len(tokens) < min(len(prompt) + sampling.max_tokens, max_context):
            law = self.law(tokens, sampling)
            if sampling.temperature > 0:
                law = law + gumbel_noise(sampling.seed, len(tokens), self._vocab_ids).to(law.dtype)
            tokens.append(int(choose_coupled(law)))
            if tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]


class ScriptedDraft(DraftSource):
    """Proposes what a function of the path says: (committed and drafted tokens) -> ranked next tokens."""

    def __init__(self, script: Callable[[list[int]], list[int]]) -> None:
        self._script = script
        self._committed: dict[str, list[int]] = {}

    def begin(self, request: BeginDraft, *, max_nodes: int) -> int:
        self._committed[request.request_id] = []
        return 0

    def _note_committed(self, request_id: str, tree: DraftTree) -> list[int]:
        known = self._committed[request_id]
        known[tree.prefix_len :] = tree.token_ids[: tree.root + 1]
        return known

    def extend(self, jobs: Sequence[ExtendJob]) -> None:
        for job in jobs:
            committed = self._note_committed(job.request_id, job.tree)
            for node in job.nodes:
                job.tree.is_read[node] = True
                if node >= job.tree.root:
                    path = [job.tree.token_ids[a] for a in reversed(job.tree.ancestors(node))]
                    ranked = self._script([*committed, *path])
                    scores = [-float(rank) for rank in range(len(ranked))]
                    job.tree.next_tokens[node] = Continuations(ranked, scores)

    def reroot(self, request_id: str, rerooting: Rerooting, tree: DraftTree) -> None:
        self._note_committed(request_id, tree)

    def end(self, request_id: str) -> None:
        self._committed.pop(request_id, None)


def draft_by_name(
    name: str,
    target: LoadedModel,
    *,
    page_size: int = 16,
    drawing: Drawing = Drawing.COUPLED,
    grammars: GrammarCompiler | None = None,
) -> DraftSource:
    """oracle: the target itself. anti: never right. noisy: often right. scripted: blind. ngram: look-up."""
    vocab_size = target.shape.vocab_size
    if name in ("oracle", "noisy"):
        draft = target if name == "oracle" else mixed_model(target, share=0.25)
        return ModelDraft(
            tiny_runner(draft, page_size=page_size),
            vocab_size=vocab_size,
            drawing=drawing,
            grammars=grammars,
        )
    if name == "ngram":
        return NgramDraft(is_coupled=drawing is Drawing.COUPLED, grammars=grammars)
    if name == "scripted":
        return ScriptedDraft(lambda path: [(sum(path) * 7 + rank) % vocab_size for rank in range(6)])
    assert name == "anti"
    plain = PlainDecoder(target)
    greedy = Sampling(max_tokens=1, seed=0)
    # The least likely tokens of the target's own law.
    return ScriptedDraft(lambda path: plain.law(path, greedy)[0].argsort()[:6].tolist())


class Recorder(Stage):
    """Stands in for the detokenizer and keeps what was committed."""

    accepts = DetokenizerMessage

    def __init__(self) -> None:
        self.messages: list[DetokenizerMessage] = []

    @property
    def committed(self) -> list[Committed]:
        """The blocks of all requests, in order."""
        return [message for message in self.messages if isinstance(message, Committed)]

    def setup(self) -> None:
        pass

    def handle(self, message: DetokenizerMessage) -> None:
        self.messages.append(message)

    def close(self) -> None:
        pass

    def tokens(self, request_id: str) -> list[int]:
        """All output tokens of a request."""
        return [t for m in self.committed if m.request_id == request_id for t in m.token_ids]

    def end(self, request_id: str) -> Committed | None:
        """The last message of a finished request."""
        ends = [m for m in self.committed if m.request_id == request_id and m.finish_reason is not None]
        return ends[0] if ends else None


SYSTEMS = ("autoregressive", "speculative", "tree", "ssd", "saguaro", "saguaro_tree")


def system_config(
    name: str, *, page_size: int = 4, max_requests: int = 1, depth: int = 4, budget: int = 6
) -> RunConfig:
    """A float64 configuration of one of the `SYSTEMS`, as the named runs differ."""
    config = make_config(
        draft=name != "autoregressive",
        prepare_outcomes=name in ("ssd", "saguaro", "saguaro_tree"),
        depth=depth,
        budget=budget,
        page_size=page_size,
        max_requests=max_requests,
    )
    if name in ("saguaro", "saguaro_tree"):
        config.speculation.fan_out = FanOut.calibrated
    if name in ("tree", "saguaro_tree"):
        config.speculation.tree = TreeConfig(nodes=9, rows=4)
    return config


def make_config(
    *,
    draft: bool = True,
    prepare_outcomes: bool = False,
    depth: int = 4,
    budget: int = 8,
    page_size: int = 16,
    max_requests: int = 1,
    max_context: int = 256,
) -> RunConfig:
    """A float64 configuration; the draft kind only says that there is one, tests hand it in."""
    config = RunConfig(max_requests=max_requests)
    config.model.dtype = DType.float64
    config.model.max_context = max_context
    config.placement.page_size = page_size
    config.speculation.draft.kind = DraftKind.model if draft else DraftKind.none
    config.speculation.prepare_outcomes = prepare_outcomes
    config.speculation.depth = depth
    config.speculation.budget = budget
    return config


class TinyPipeline:
    """Verifier, speculator and predictor in one thread, fed with token ids."""

    def __init__(
        self,
        config: RunConfig,
        target: LoadedModel,
        source: DraftSource | None = None,
        *,
        order_seed: int | None = None,
        target_is_slow: bool = True,
        text_decoder: TextDecoder | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """target_is_slow: the draft side gets all its work done before the target verifies; else the target
        verifies as soon as it can. order_seed: anything in between, drawn at random.
        text_decoder, grammars: what requests with stop strings and with structured outputs need.
        """
        self.recorder = Recorder()
        stages: dict[StageName, Callable[[StageContext], Stage]] = {
            StageName.DETOKENIZER: lambda context: self.recorder
        }
        if source is not None:
            stages[StageName.SPECULATOR] = lambda context: DraftSpeculator(config, context, source)
        if config.speculation.prepare_outcomes:
            stages[StageName.PREDICTOR] = lambda context: OutcomePredictor(config, context)
        # The runtime offers work in this order.
        verifier = {
            StageName.VERIFIER: lambda context: TargetVerifier(
                config, context, target, text_decoder, grammars
            )
        }
        stages = {**stages, **verifier} if target_is_slow else {**verifier, **stages}
        self.runtime = InProcess(stages, msgspec.msgpack.encode(config), order_seed=order_seed)

    def submit(self, request_id: str, prompt: Sequence[int], sampling: Sampling) -> None:
        """Queue a request at the verifier."""
        self.runtime.send(
            StageName.VERIFIER,
            TokenizedRequest(
                request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling, submitted_ns=0
            ),
        )

    def finish(self, *request_ids: str) -> None:
        """Run until these requests are finished, then until nothing moves; no message may be refused."""
        self.runtime.run_until(lambda: all(self.recorder.end(i) is not None for i in request_ids))
        self.runtime.run_until_idle()
        assert self.runtime.protocol_errors == []

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """One request from start to end."""
        self.submit("r", prompt, sampling)
        self.finish("r")
        return self.recorder.tokens("r")
