"""The rejection rule in the whole pipeline: the law of what each system commits, after hits and misses alike.

Tiny float64 models with 8 tokens, real stages in one thread. Given all tokens before it, every committed
token must follow the target's law, whatever drafts, predicts or fills in, and also among the tokens of one
kind of round and one place in it: both are decided before the token. So the tokens of each such group are
compared with the sum of their laws. Their classes are the ranks of p / q (what the draft thinks too little of
comes first), where a fault of the rule shows. Each comparison has a false alarm of 1 in 10^7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import stages.draft_speculator.drawn_tokens as drawing
import stages.target_verifier.rejection as judgement
from conf.schema import Backup, FanOut, PlanMode, RunConfig, TreeConfig, Verification
from kernels.rejection import choose_child, draw_children, saguaro_law
from kernels.sampling import sampling_law
from pipeline.messages import Committed, ProposalSource, Sampling
from stages.draft_speculator.draft_source import DraftSource, Drawing
from stages.draft_speculator.growth import Entry
from stages.draft_speculator.model_draft import ModelDraft
from stages.draft_speculator.ngram_draft import NgramDraft
from stages.draft_speculator.planner import Planner
from stages.model.batch import ForwardBatch, SequenceRows
from stages.model.runner import ModelRunner
from stages.model.shape import parse_shape
from stages.model.weights import LoadedModel, random_model
from tests.statistics import fit_of_conditional_draws
from tests.tiny import (
    PlainDecoder,
    TinyPipeline,
    draft_by_name,
    make_config,
    mixed_model,
    tiny_runner,
    tiny_target,
)

VOCAB_SIZE = 8
PROMPT = [1, 5, 2, 5, 2, 6, 1, 5]
NUM_REQUESTS = 24
MAX_TOKENS = 60
BATCH = 12
FALSE_ALARM = 1e-7
LEAST_DRAWS = 100
"""Smaller groups say nothing."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _small_model(seed: int) -> LoadedModel:
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    return random_model(parse_shape(config, {}, origin="small"), seed=seed, dtype=torch.float64)


TARGET = _small_model(3)
DRAFT = mixed_model(TARGET, share=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What is run, and which groups of tokens it must give."""

    widths: list[int] | None = None
    nodes: int | None = None
    prepare_outcomes: bool = True
    c: float | None = None
    backup: Backup = Backup.sequential
    fan_out: FanOut = FanOut.uniform
    is_ngram: bool = False
    min_path_prob: float = 0.0
    look_up: int = 0
    plan: PlanMode = PlanMode.fixed
    sampling: dict[str, float] | None = None
    order_seed: int | None = None
    sources: tuple[ProposalSource, ...] = (ProposalSource.HIT, ProposalSource.BACKUP)

    def config(self) -> RunConfig:
        config = make_config(
            prepare_outcomes=self.prepare_outcomes,
            depth=2,
            budget=6,
            page_size=4,
            max_requests=BATCH,
            max_context=128,
        )
        speculation = config.speculation
        speculation.verification = Verification.rejection
        speculation.saguaro_c = self.c
        speculation.tree = TreeConfig(widths=self.widths, nodes=self.nodes, rows=4 if self.nodes else None)
        speculation.backup = self.backup
        speculation.fan_out = self.fan_out
        speculation.min_path_prob = self.min_path_prob
        speculation.draft.look_up = self.look_up
        speculation.plan = self.plan
        return config

    def run(self, *, num_requests: int = NUM_REQUESTS) -> list[Committed]:
        """What was committed, in order."""
        config = self.config()
        pipeline = TinyPipeline(config, TARGET, _source(config, self), order_seed=self.order_seed)
        names = [str(number) for number in range(num_requests)]
        for seed, name in enumerate(names):
            pipeline.submit(name, PROMPT, self._sampling(seed))
        pipeline.runtime.run_until(lambda: pipeline.recorder.end(names[-1]) is not None, max_steps=10**7)
        pipeline.finish(*names)
        return pipeline.recorder.committed

    def _sampling(self, seed: int) -> Sampling:
        return Sampling(max_tokens=MAX_TOKENS, seed=seed, **(self.sampling or {"temperature": 1.0}))

    def laws(self, model: LoadedModel, tokens: Sequence[int]) -> Tensor:
        """A model's law after every token, [tokens, V]."""
        sampling = self._sampling(0)
        law = sampling_law(
            _logits(tiny_runner(model), tokens),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        return law.softmax(dim=-1)


def _logits(runner: ModelRunner, tokens: Sequence[int]) -> Tensor:
    size = len(tokens)
    rows = SequenceRows(
        kv=runner.kv.allocate(size), prefix_len=0, write_slots=list(range(size)), tail_len=size, mask=None
    )
    return runner.forward(
        ForwardBatch(token_ids=list(tokens), positions=list(range(size)), sequences=[rows], logit_rows=None)
    )


def _source(config: RunConfig, system: System) -> DraftSource:
    if system.is_ngram:
        return NgramDraft(is_coupled=False)
    return ModelDraft(
        tiny_runner(DRAFT, page_size=4, num_slots=20_000),
        vocab_size=VOCAB_SIZE,
        num_ranked=4,
        drawing=Drawing.of(config.speculation),
        saguaro_c=system.c,
    )


def _groups(
    system: System, *, num_requests: int = NUM_REQUESTS
) -> dict[tuple[ProposalSource | None, int], float]:
    """p-values by the source of the round and the place of the token in it."""
    by_request: dict[str, list[Committed]] = {}
    for block in system.run(num_requests=num_requests):
        by_request.setdefault(block.request_id, []).append(block)
    draws: dict[tuple[ProposalSource | None, int], list[tuple[int, Tensor]]] = {}
    for blocks in by_request.values():
        tokens = [token for block in blocks for token in block.token_ids]
        context = [*PROMPT, *tokens[:-1]]
        start = len(PROMPT) - 1
        probs = system.laws(TARGET, context)[start:]
        order = (probs / system.laws(DRAFT, context)[start:].clamp(min=1e-9)).argsort(dim=-1)
        ranked = probs.gather(1, order)
        place = 0
        for block in blocks:
            for index, token in enumerate(block.token_ids):
                rank = order[place].tolist().index(token)
                draws.setdefault((block.source, min(index, 2)), []).append((rank, ranked[place]))
                place += 1
    return {
        group: fit_of_conditional_draws(
            torch.tensor([rank for rank, _ in members]), torch.stack([law for _, law in members])
        )
        for group, members in draws.items()
        if len(members) >= LEAST_DRAWS
    }


SYSTEMS = {
    "chain": System(prepare_outcomes=False, sources=(ProposalSource.DRAFT,)),
    "tree": System(prepare_outcomes=False, widths=[3, 2], sources=(ProposalSource.DRAFT,)),
    "best first": System(prepare_outcomes=False, nodes=6, sources=(ProposalSource.DRAFT,)),
    "look-up": System(prepare_outcomes=False, is_ngram=True, sources=(ProposalSource.DRAFT,)),
    "ssd": System(),
    "ssd, C = 0.3": System(c=0.3, fan_out=FanOut.geometric),
    "ssd, C = 0": System(c=0.0, sources=(ProposalSource.HIT,)),
    "ssd, look-up after a miss": System(c=0.3, backup=Backup.ngram, fan_out=FanOut.calibrated, order_seed=4),
    "ssd of look-up": System(is_ngram=True, backup=Backup.ngram),
    "tree with ssd": System(widths=[2, 2], c=0.3, fan_out=FanOut.calibrated, min_path_prob=0.1),
    "best first with ssd": System(nodes=5, backup=Backup.ngram, fan_out=FanOut.calibrated),
    "random tokens after a miss, look-up beside the draft": System(
        backup=Backup.random, look_up=2, widths=[2, 1], order_seed=2
    ),
    "planned": System(backup=Backup.auto, look_up=1, plan=PlanMode.auto, sources=()),
    "filters": System(
        prepare_outcomes=False,
        widths=[2, 1],
        sampling={"temperature": 0.7, "top_k": 6, "top_p": 0.95},
        sources=(ProposalSource.DRAFT,),
    ),
}


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS.keys())
def test_every_token_follows_the_targets_law(system: System) -> None:
    values = _groups(system)
    for source in system.sources:
        assert (source, 0) in values, "too few rounds of this kind to say anything"
    assert min(values.values()) > FALSE_ALARM, values


def _accepts_with_probability_p(
    target_probs: Tensor, draft_laws: Sequence[Tensor], children: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    ones = [torch.ones_like(law) for law in draft_laws]
    accepted, _ = choose_child(target_probs, ones, children, uniforms)
    return accepted, choose_child(target_probs, draft_laws, children, torch.ones_like(uniforms))[1]


def _draws_the_bonus_from_the_whole_law(
    target_probs: Tensor, draft_laws: Sequence[Tensor], children: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    return choose_child(target_probs, draft_laws, children, uniforms)[0], target_probs


def _keeps_tried_siblings(draft_probs: Tensor, children: Tensor) -> list[Tensor]:
    return [draft_probs] * children.shape[1]


def _draws_sharper(weights: Tensor, uniforms: Tensor) -> Tensor:
    return draw_children(weights**3, uniforms)


FAULTS: dict[str, tuple[System, object, str, object]] = {
    "accepted with probability p": (SYSTEMS["chain"], judgement, "choose_child", _accepts_with_probability_p),
    "the bonus forgets the rejection": (
        SYSTEMS["chain"],
        judgement,
        "choose_child",
        _draws_the_bonus_from_the_whole_law,
    ),
    "tried siblings stay": (
        System(prepare_outcomes=False, widths=[4]),
        judgement,
        "laws_in_turn",
        _keeps_tried_siblings,
    ),
    "drawn from a sharper law than is said": (SYSTEMS["chain"], drawing, "draw_children", _draws_sharper),
}


@pytest.mark.parametrize(("system", "where", "name", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, system: System, where: object, name: str, fault: object
) -> None:
    monkeypatch.setattr(where, name, fault)
    assert min(_groups(system, num_requests=2 * NUM_REQUESTS).values()) < FALSE_ALARM


def test_the_draft_draws_with_the_announced_fan_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Saguaro sampling would be off, and no law would tell. A budget of 6 is 2 at each of 3 depths."""
    used: list[int] = []

    def recorded(law: Tensor, fan_outs: Sequence[int], c: float) -> Tensor:
        used.extend(fan_outs)
        return saguaro_law(law, fan_outs, c)

    monkeypatch.setattr(drawing, "saguaro_law", recorded)
    SYSTEMS["ssd, C = 0"].run(num_requests=1)
    assert len(used) > MAX_TOKENS
    assert set(used) == {2}


class _Trimmer(Planner):
    """Would leave out what is unlikely, and with it change the law of what was drawn."""

    def keep(self, entries: Sequence[Entry], *, other_rows: int) -> list[Entry]:
        raise AssertionError("the planner was asked which drawn tokens to keep")


@pytest.mark.parametrize("name", ["chain", "tree with ssd"])
def test_no_drawn_token_is_left_out_by_its_value(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("stages.draft_speculator.stage.Planner", _Trimmer)
    assert SYSTEMS[name].run(num_requests=1)


@pytest.mark.parametrize("name", ["ssd, look-up after a miss", "tree with ssd"])
def test_the_same_seed_gives_the_same_answer(name: str) -> None:
    first, second = (
        [(block.request_id, block.token_ids) for block in SYSTEMS[name].run(num_requests=3)] for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("draft", ["oracle", "noisy", "scripted", "ngram"])
@pytest.mark.parametrize("tree", [TreeConfig(), TreeConfig(widths=[2, 2]), TreeConfig(nodes=6, rows=3)])
@pytest.mark.parametrize("prepare_outcomes", [False, True])
def test_temperature_0_is_plain_greedy_decoding(prepare_outcomes: bool, tree: TreeConfig, draft: str) -> None:
    target = tiny_target()
    config = make_config(prepare_outcomes=prepare_outcomes, budget=5)
    config.speculation.verification = Verification.rejection
    config.speculation.tree = tree
    sampling = Sampling(max_tokens=24, seed=11)
    pipeline = TinyPipeline(
        config, target, draft_by_name(draft, target, drawing=Drawing.of(config.speculation))
    )
    assert pipeline.generate(PROMPT, sampling) == PlainDecoder(target).generate(PROMPT, sampling)
