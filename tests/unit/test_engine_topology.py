"""Which stages a configuration starts, on which cores, and what importing the runtime costs."""

import subprocess
import sys

import msgspec
import pytest

from conf.schema import Backup, DraftConfig, DraftKind, PlacementConfig, RunConfig, SpeculationConfig
from pipeline.engine import Engine, build_topology
from pipeline.errors import ConfigError, EngineDead, RequestError
from pipeline.messages import ChatTurn, Sampling, StageName
from pipeline.placement import CorePlan, plan_cores

PLAN = CorePlan(target=(0, 1), draft=(2, 3, 4))
ALWAYS = {StageName.TOKENIZER, StageName.DETOKENIZER, StageName.VERIFIER}


def config(kind: DraftKind, prepare_outcomes: bool) -> RunConfig:
    speculation = SpeculationConfig(prepare_outcomes=prepare_outcomes, draft=DraftConfig(kind=kind))
    return RunConfig(speculation=speculation)


@pytest.mark.parametrize(
    ("kind", "prepare_outcomes", "more"),
    [
        (DraftKind.none, False, set()),
        (DraftKind.ngram, False, {StageName.SPECULATOR}),
        (DraftKind.layers, True, {StageName.SPECULATOR, StageName.PREDICTOR}),
    ],
)
def test_only_the_stages_that_the_configuration_needs_are_started(kind, prepare_outcomes, more):
    topology = build_topology(config(kind, prepare_outcomes), PLAN)
    assert {spec.name for spec in topology} == ALWAYS | more


def test_the_target_has_its_cores_and_everything_else_shares_the_others():
    topology = {spec.name: spec for spec in build_topology(config(DraftKind.layers, True), PLAN)}
    verifier = topology.pop(StageName.VERIFIER)
    assert (verifier.cores, verifier.threads) == ((0, 1), 2)
    assert {spec.cores for spec in topology.values()} == {(2, 3, 4)}
    assert topology.pop(StageName.SPECULATOR).threads == 3
    assert {spec.threads for spec in topology.values()} == {1}


def test_threads_that_share_their_cores_with_another_stage_do_not_spin():
    shared = CorePlan(target=(0, 1), draft=(0, 1))

    def patient(kind: DraftKind, plan: CorePlan) -> set[StageName]:
        topology = build_topology(config(kind, kind is not DraftKind.none), plan)
        return {spec.name for spec in topology if spec.has_patient_threads}

    assert patient(DraftKind.layers, shared) == {StageName.VERIFIER, StageName.SPECULATOR}
    assert patient(DraftKind.none, shared) == set()  # nothing computes beside it
    assert patient(DraftKind.layers, PLAN) == set()


@pytest.mark.parametrize(
    ("fields", "usable", "target", "draft"),
    [
        ({}, (4, 5), (4,), (5,)),
        ({}, range(5), (0, 1), (2, 3, 4)),
        ({"target_cores": 3}, range(5), (0, 1, 2), (3, 4)),
        ({"draft_cores": 4}, range(5), (0,), (1, 2, 3, 4)),
        ({"target_cores": 1, "draft_cores": 1}, range(5), (0,), (1,)),
        ({"name": "cpu_shared"}, (4, 5), (4, 5), (4, 5)),
        ({"name": "cpu_shared", "target_cores": 2, "draft_cores": 1}, (4, 5, 6), (4, 5), (4,)),
    ],
)
def test_cores_are_shared_out(fields, usable, target, draft):
    plan = plan_cores(PlacementConfig(**fields), usable)
    assert (plan.target, plan.draft, plan.is_crowded) == (target, draft, False)


def test_a_single_core_is_shared_and_said_to_be():
    assert plan_cores(PlacementConfig(), (3,)) == CorePlan(target=(3,), draft=(3,), is_crowded=True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"target_cores": 3}, "placement.target_cores=3: expected 1 to 2"),
        ({"draft_cores": 0}, "placement.draft_cores=0: expected 1 to 2"),
        ({"target_cores": 2}, "choose placement=cpu_shared"),
        ({"target_cores": 1, "draft_cores": 2}, "choose placement=cpu_shared"),
        ({"name": "gpu"}, "placement=gpu: expected cpu_split or cpu_shared"),
    ],
)
def test_cores_that_are_not_there_are_refused(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        plan_cores(PlacementConfig(**fields), (0, 1))


def test_a_configuration_survives_the_way_to_the_stages():
    sent = config(DraftKind.model, True)
    sent.speculation.draft.path = "somewhere"
    sent.speculation.tree.widths = [3, 2]
    sent.speculation.backup = Backup.auto
    sent.speculation.saguaro_c = 0.5
    sent.seed = 2**63 - 1
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=RunConfig)
    assert arrived == sent
    assert arrived.speculation.backup is Backup.auto
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(RunConfig()), type=RunConfig) == RunConfig()


def test_a_request_is_a_prompt_a_chat_or_token_ids():
    engine = Engine(RunConfig(placement=PlacementConfig(name="cpu_shared")))
    sampling = Sampling(max_tokens=1, seed=0)
    with pytest.raises(
        RequestError, match="a: expected exactly one of prompt, chat and prompt_token_ids, got none"
    ):
        engine.submit(request_id="a", sampling=sampling)
    with pytest.raises(RequestError, match="got prompt and prompt_token_ids; leave out all but one"):
        engine.submit(request_id="a", prompt="", prompt_token_ids=[1], sampling=sampling)
    with pytest.raises(RequestError, match=r"a: prompt_token_ids\[0\]: expected a token id"):
        engine.submit(request_id="a", prompt_token_ids=[2**31], sampling=sampling)
    with pytest.raises(EngineDead, match="not started"):
        engine.submit(request_id="a", prompt_token_ids=[1], sampling=sampling)
    with pytest.raises(RequestError, match="got prompt and chat"):
        engine.submit(request_id="a", prompt="", chat=[ChatTurn(role="user", content="")], sampling=sampling)
    with pytest.raises(EngineDead, match="not started"):
        engine.submit(request_id="a", prompt="", sampling=sampling)


def test_the_runtime_imports_no_model_library():
    modules = "pipeline pipeline.engine pipeline.inprocess pipeline.process pipeline.supervisor"
    program = "\n".join(
        [
            "import sys, importlib",
            f"for name in {modules.split()}: importlib.import_module(name)",
            "print(sorted({'torch', 'transformers', 'tokenizers', 'hydra', 'omegaconf'} & set(sys.modules)))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
