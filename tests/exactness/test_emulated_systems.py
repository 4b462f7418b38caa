"""All systems return the tokens of plain decoding on an emulated model, and accept as its law says."""

from __future__ import annotations

import msgspec
import pytest

from conf.check import check
from conf.compose import compose
from conf.schema import DraftKind, RunConfig
from pipeline.messages import ProposalSource, Sampling
from tools.figures.in_process import Rounds, run_in_process

PROMPTS = [[17, 3, 99, 42, 8, 17, 3], [1], [200, 300, 400]]
SYSTEMS = {
    "speculative": ["conf=speculative"],
    "tree": ["conf=tree"],
    "ssd": ["conf=ssd"],
    "saguaro": ["conf=saguaro"],
    "saguaro_tree": ["conf=saguaro_tree"],
    "widths": ["conf=saguaro_tree", "speculation.tree.widths=[3,2,1]", "speculation.fan_out=geometric"],
    "look-up": ["conf=speculative", "speculation.draft.kind=ngram"],
}


def emulated(*arguments: str) -> RunConfig:
    """A configuration without waits, whose models are found."""
    model = [] if any(argument.startswith("model=") for argument in arguments) else ["model=emulated"]
    config = compose([*model, "model.emulated.time_scale=0", "model.max_context=2048", *arguments])
    check(config)
    if config.speculation.draft.kind is DraftKind.auto:
        config.speculation.draft.kind = DraftKind.model
    return config


def answer(config: RunConfig, temperature: float, max_tokens: int, **options: int) -> Rounds:
    return run_in_process(
        config,
        PROMPTS,
        lambda index: Sampling(max_tokens=max_tokens, temperature=temperature, seed=11 + index),
        **options,
    )


@pytest.fixture(scope="module")
def expected() -> dict[float, list[list[int]]]:
    plain = emulated("conf=autoregressive")
    return {temperature: answer(plain, temperature, 60).token_ids for temperature in (0.0, 1.0)}


@pytest.mark.parametrize(("max_requests", "order_seed"), [(1, None), (3, 1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS.keys())
def test_every_system_returns_the_tokens_of_plain_decoding(
    expected, system, temperature, max_requests, order_seed
):
    config = emulated(*system, f"max_requests={max_requests}", "placement.page_size=4")
    assert answer(config, temperature, 60, order_seed=order_seed).token_ids == expected[temperature]


def test_another_seed_is_another_text(expected):
    other = emulated("conf=autoregressive", "model.emulated.seed=2")
    assert answer(other, 0.0, 60).token_ids != expected[0.0]


def test_acceptance_and_hits_are_those_of_the_published_measurements():
    """Llama-70B with K = 7 and F = 3: 5.68 tokens a round after a hit, 4.01 after a miss, hit rate 0.88."""
    config = emulated("model=emulated_llama3_70b", "conf=ssd", "speculation.depth=7", "speculation.budget=24")
    rounds = answer(config, 0.0, 300)
    # Rounds depend on one another: four standard deviations or so.
    assert abs(rounds.hit_rate - 0.88) < 0.11
    assert abs(rounds.mean(ProposalSource.HIT) - 5.68) < 1.1
    assert abs(rounds.mean(ProposalSource.BACKUP) - 4.01) < 1.9


def test_a_warmer_text_is_predicted_less_often():
    config = emulated("model=emulated_llama3_70b", "conf=ssd", "speculation.budget=12")
    cold, warm = (answer(config, temperature, 300).hit_rate for temperature in (0.0, 1.0))
    assert warm < cold - 0.05


def test_an_emulated_configuration_survives_the_wire():
    config = emulated("conf=saguaro", "model.emulated.target_ms=[3,4.5]")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=RunConfig) == config
