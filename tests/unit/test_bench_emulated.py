"""Benches of emulated models: real plans, and an engine in its processes."""

import pytest

from pipeline.errors import ConfigError
from tools.bench.plan import Plan, make_plan
from tools.bench.protocol import EngineSpec
from tools.bench.settings import compose_settings


def plan_of(*arguments: str) -> Plan:
    return make_plan(compose_settings(["out=x", "num_prompts=2", *arguments]))


def test_an_emulated_model_is_chosen_by_its_name() -> None:
    plan = plan_of("model=emulated_qwen3_32b", "systems=autoregressive,saguaro", "batch_sizes=2")
    for system in plan.systems:
        spec = system.spec_for(plan.phases[0])
        assert isinstance(spec, EngineSpec)
        assert spec.config.model.is_emulated
        assert spec.config.model.name == "emulated_qwen3_32b"
        assert (spec.config.max_requests, spec.config.placement.name) == (2, "cpu_split")
    assert not plan.prompts[0].question.is_chat
    assert plan.prompts[0].question.prompt_token_ids
    assert "emulated_qwen3_32b" in str(plan.identity())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "expected systems of ours only, .* no weights for transformers; leave transformers out"),
        (["systems=autoregressive,a=autoregressive+model.weights=int8"], "model=emulated has no matrices"),
        (["systems=autoregressive", "max_tokens=8192"], "more than the context of 8192"),
    ],
)
def test_what_an_emulated_model_cannot_do_is_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_of("model=emulated", *arguments)


def test_what_is_no_name_of_ours_is_looked_for_as_a_folder() -> None:
    for model in ("custom", "emulated_gpt", "./demo"):
        with pytest.raises(ConfigError, match=f"^model={model} does not exist"):
            plan_of(f"model={model}", "systems=autoregressive")
