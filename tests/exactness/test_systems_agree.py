"""All systems return the tokens of plain decoding, whatever the draft, depth, budget, page size or timing."""

from __future__ import annotations

import pytest
import torch

from conf.schema import Backup, FanOut, PlanMode, TreeConfig
from pipeline.messages import Sampling
from tests.tiny import PlainDecoder, TinyPipeline, draft_by_name, make_config, tiny_target

PROMPT = [17, 3, 99, 42, 8, 17, 3]
DRAFTS = ["oracle", "anti", "noisy", "scripted", "ngram"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def expected() -> dict[float, list[int]]:
    """Output of the plain reference by temperature, 48 tokens."""
    plain = PlainDecoder(tiny_target())
    return {t: plain.generate(PROMPT, _sampling(t)) for t in (0.0, 1.0)}


def _sampling(temperature: float, max_tokens: int = 48) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=temperature, seed=11)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_autoregressive_equals_the_plain_loop(expected: dict[float, list[int]], temperature: float) -> None:
    pipeline = TinyPipeline(make_config(draft=False), tiny_target())
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [1, 4, 7])
@pytest.mark.parametrize("draft", DRAFTS)
def test_linear_speculation_equals_the_plain_loop(
    expected: dict[float, list[int]], draft: str, depth: int, page_size: int, temperature: float
) -> None:
    target = tiny_target()
    config = make_config(depth=depth, page_size=page_size)
    pipeline = TinyPipeline(config, target, draft_by_name(draft, target, page_size=page_size))
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


@pytest.mark.parametrize("order_seed", [None, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fan_out", list(FanOut))
@pytest.mark.parametrize(("depth", "budget", "page_size"), [(1, 3, 1), (4, 1, 4), (4, 12, 16), (7, 8, 4)])
@pytest.mark.parametrize("draft", DRAFTS)
def test_ssd_equals_the_plain_loop(
    expected: dict[float, list[int]],
    draft: str,
    depth: int,
    budget: int,
    page_size: int,
    fan_out: FanOut,
    temperature: float,
    order_seed: int | None,
) -> None:
    target = tiny_target()
    config = make_config(prepare_outcomes=True, depth=depth, budget=budget, page_size=page_size)
    config.speculation.fan_out = fan_out
    source = draft_by_name(draft, target, page_size=page_size)
    pipeline = TinyPipeline(config, target, source, order_seed=order_seed)
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


TREES = {
    "widths 4 2 1": TreeConfig(widths=[4, 2, 1]),
    "widths 2 2 2": TreeConfig(widths=[2, 2, 2]),
    "widths 1 3": TreeConfig(widths=[1, 3]),
    "12 best, 1 a step": TreeConfig(nodes=12, rows=1),
    "9 best, 5 a step": TreeConfig(nodes=9, rows=5),
    "2 best": TreeConfig(nodes=2),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("draft", DRAFTS)
def test_trees_equal_the_plain_loop(
    expected: dict[float, list[int]], draft: str, tree: TreeConfig, temperature: float
) -> None:
    target = tiny_target()
    config = make_config(page_size=1)
    config.speculation.tree = tree
    pipeline = TinyPipeline(config, target, draft_by_name(draft, target, page_size=1))
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


@pytest.mark.parametrize(("fan_out", "order_seed"), list(zip(FanOut, [1, 2, None], strict=True)))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("draft", DRAFTS)
def test_trees_with_ssd_equal_the_plain_loop(
    expected: dict[float, list[int]],
    draft: str,
    tree: TreeConfig,
    fan_out: FanOut,
    temperature: float,
    order_seed: int | None,
) -> None:
    target = tiny_target()
    config = make_config(prepare_outcomes=True, budget=6, page_size=4)
    config.speculation.tree = tree
    config.speculation.fan_out = fan_out
    source = draft_by_name(draft, target, page_size=4)
    pipeline = TinyPipeline(config, target, source, order_seed=order_seed)
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("order_seed", [None, 3])
@pytest.mark.parametrize("tree", [TreeConfig(), TreeConfig(widths=[2, 2]), TreeConfig(nodes=7, rows=4)])
@pytest.mark.parametrize("draft", ["oracle", "noisy", "scripted", "ngram"])
def test_misses_answered_by_look_up_change_no_token(
    expected: dict[float, list[int]], draft: str, tree: TreeConfig, order_seed: int | None, temperature: float
) -> None:
    target = tiny_target()
    config = make_config(prepare_outcomes=True, budget=4, page_size=4)
    config.speculation.tree = tree
    config.speculation.backup = Backup.ngram
    pipeline = TinyPipeline(config, target, draft_by_name(draft, target, page_size=4), order_seed=order_seed)
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


@pytest.mark.parametrize("prepare_outcomes", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nodes", [None, 8])
def test_a_draft_that_stops_when_in_doubt_changes_no_token(
    expected: dict[float, list[int]], nodes: int | None, temperature: float, prepare_outcomes: bool
) -> None:
    target = tiny_target()
    config = make_config(prepare_outcomes=prepare_outcomes, depth=6, budget=5)
    config.speculation.min_path_prob = 0.2
    config.speculation.tree = TreeConfig(nodes=nodes, rows=3)
    pipeline = TinyPipeline(config, target, draft_by_name("noisy", target))
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("order_seed", [None, 3])
@pytest.mark.parametrize("tree", [TreeConfig(), TreeConfig(widths=[2, 2]), TreeConfig(nodes=7, rows=4)])
@pytest.mark.parametrize("backup", [Backup.random, Backup.auto])
@pytest.mark.parametrize("draft", ["noisy", "anti"])
def test_other_backups_and_tokens_looked_up_beside_the_draft_change_no_token(
    expected: dict[float, list[int]],
    draft: str,
    backup: Backup,
    tree: TreeConfig,
    order_seed: int | None,
    temperature: float,
) -> None:
    target = tiny_target()
    config = make_config(prepare_outcomes=True, budget=4, page_size=4)
    config.speculation.tree = tree
    config.speculation.backup = backup
    config.speculation.draft.look_up = 3
    pipeline = TinyPipeline(config, target, draft_by_name(draft, target, page_size=4), order_seed=order_seed)
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("order_seed", [None, 3])
@pytest.mark.parametrize("tree", [TreeConfig(), TreeConfig(widths=[2, 2]), TreeConfig(nodes=7, rows=4)])
@pytest.mark.parametrize("prepare_outcomes", [False, True])
@pytest.mark.parametrize("draft", DRAFTS)
def test_what_the_planner_chooses_changes_no_token(
    expected: dict[float, list[int]],
    draft: str,
    prepare_outcomes: bool,
    tree: TreeConfig,
    order_seed: int | None,
    temperature: float,
) -> None:
    """Its choices follow the clock, and so differ from run to run; the tokens must not."""
    target = tiny_target()
    config = make_config(prepare_outcomes=prepare_outcomes, budget=6, page_size=4)
    config.speculation.tree = tree
    config.speculation.plan = PlanMode.auto
    config.speculation.backup = Backup.auto
    config.speculation.draft.look_up = 2
    pipeline = TinyPipeline(config, target, draft_by_name(draft, target, page_size=4), order_seed=order_seed)
    assert pipeline.generate(PROMPT, _sampling(temperature)) == expected[temperature]


FILTERS = {
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.03},
    "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
}


@pytest.mark.parametrize("system", ["autoregressive", "speculative", "ssd"])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("draft", ["oracle", "noisy", "ngram"])
def test_filters_are_part_of_the_targets_law_in_every_system(
    draft: str, filters: dict[str, float], system: str
) -> None:
    target = tiny_target()
    sampling = Sampling(max_tokens=40, temperature=0.9, seed=21, **filters)
    expected = PlainDecoder(target).generate(PROMPT, sampling)
    assert expected != PlainDecoder(target).generate(
        PROMPT, Sampling(max_tokens=40, temperature=0.9, seed=21)
    )
    config = make_config(draft=system != "autoregressive", prepare_outcomes=system == "ssd")
    source = None if system == "autoregressive" else draft_by_name(draft, target)
    assert TinyPipeline(config, target, source).generate(PROMPT, sampling) == expected
