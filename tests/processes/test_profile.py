"""A profiled run with a tiny model in real processes, and profiles of an engine from outside."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.check import check
from conf.compose import compose
from pipeline.engine import Engine
from pipeline.errors import ConfigError, RequestError
from pipeline.messages import RequestFinished, Sampling, StageName
from pipeline.model_source import resolve_models
from pipeline.profiling import EngineProfile, ProfileClient
from pipeline.spans import SpanKind
from tests.processes.runtime import TOKENIZER, VERIFIER, collect, supervise, traces
from tests.processes.toy_stages import Item
from tests.tiny_model_folder import save_tiny_model
from tools.profile.attach import find_run
from tools.profile.command import main, write_files
from tools.profile.rounds import find_rounds
from tools.profile.settings import split_settings
from tools.profile.timeline import make_timeline
from tools.profile.trace import read_kernels

SPECULATOR, PREDICTOR = StageName.SPECULATOR, StageName.PREDICTOR


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def engine_config(model: Path, *overrides: str):
    """`saguaro` that drafts after a miss, with a draft that is right now and then."""
    config = compose(
        [
            "conf=saguaro",
            f"model.path={model}",
            "model.dtype=float32",
            "speculation.draft.layers=3",
            "speculation.backup=sequential",
            "speculation.plan=fixed",
            *overrides,
        ]
    )
    check(config)
    return config


def generate(engine: Engine, *, max_tokens: int = 100, request_id: str = "r") -> RequestFinished:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.5, seed=1)
    engine.submit(request_id=request_id, prompt="hello there, and some more", sampling=sampling)
    while True:
        for event in engine.events(5.0):
            if isinstance(event, RequestFinished):
                return event


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(engine_config(model)) as engine:
        yield engine


@pytest.fixture(scope="module")
def profiled():
    """The profile of one request, and the request's end. The models are emulated, so that on every machine a
    forward of the target lasts longer than a step that prepares its outcomes."""
    config = compose(
        [
            "conf=saguaro",
            "model=emulated",
            "model.emulated.target_ms=[20,25]",
            "speculation.backup=sequential",
            "speculation.plan=fixed",
        ]
    )
    check(config)
    with Engine(resolve_models(config)) as engine:
        engine.start_profile(num_spans=100_000)
        finished = generate(engine)
        return engine.end_profile(), finished


def test_every_stage_records_every_kind_of_span_that_it_can(profiled):
    profile, finished = profiled
    timeline = make_timeline(profile)
    kinds = {name: {span.kind for span in spans} for name, spans in timeline.spans.items()}
    mail = {SpanKind.RECEIVE, SpanKind.HANDLE, SpanKind.SEND, SpanKind.WAIT}
    assert kinds[StageName.TOKENIZER] == kinds[StageName.DETOKENIZER] == mail
    assert kinds[StageName.FRONTEND] == {SpanKind.RECEIVE, SpanKind.SEND}
    assert kinds[PREDICTOR] == mail | {SpanKind.PLAN}
    reading = {SpanKind.READ, SpanKind.DRAFT, SpanKind.GLUE, SpanKind.BRANCH}
    drafting = {SpanKind.WORK, SpanKind.LOOKUP} | reading
    assert kinds[SPECULATOR] - {SpanKind.WAIT} == (mail | drafting) - {SpanKind.WAIT}
    verifying = {SpanKind.WORK, SpanKind.PREFILL, SpanKind.VERIFY, SpanKind.COMMIT}
    assert kinds[VERIFIER] >= mail | verifying
    rounds = [span.round_id for span in timeline.of_kind(VERIFIER, SpanKind.VERIFY)]
    assert rounds == list(range(1, finished.metrics.num_rounds))


def test_the_target_verifies_while_the_draft_computes_branches(profiled):
    timeline = make_timeline(profiled[0])
    branches = timeline.of_kind(SPECULATOR, SpanKind.BRANCH)
    overlaps = [
        (verify.round_id, branch.round_id)
        for verify in timeline.of_kind(VERIFIER, SpanKind.VERIFY)
        for branch in branches
        if branch.start_ns < verify.end_ns and verify.start_ns < branch.end_ns
    ]
    assert any(verified == prepared for verified, prepared in overlaps)


def test_the_profile_and_the_engines_own_figures_agree(profiled):
    profile, finished = profiled
    rounds = find_rounds(make_timeline(profile))
    metrics = finished.metrics
    assert len(rounds) == metrics.num_rounds - 1

    def total_ms(values):
        return sum(values) / 1e6

    compute_ms = total_ms(item.cause_ns["target"] for item in rounds)
    assert compute_ms == pytest.approx(metrics.target_compute_ms, rel=1e-6)
    # The engine's clock stops before the last commits are sent, and a draft step counts for its request only.
    decode_ms = total_ms(item.length_ns for item in rounds)
    assert decode_ms == pytest.approx(1000 * metrics.decode_seconds, rel=0.05)
    assert sum(item.ready_length > 0 for item in rounds) == metrics.cache_hits
    assert total_ms(item.at_once_ns for item in rounds) == pytest.approx(metrics.overlap_ms, rel=0.1)


def test_spans_of_every_stage_nest(profiled):
    for spans in make_timeline(profiled[0]).spans.values():
        open_ends: list[int] = []
        for span in spans:
            while open_ends and open_ends[-1] <= span.start_ns:
                open_ends.pop()
            assert not open_ends or span.end_ns <= open_ends[-1]
            open_ends.append(span.end_ns)


def test_all_messages_between_stages_are_matched(profiled):
    profile, finished = profiled
    timeline = make_timeline(profile)
    outcomes = [m for m in timeline.mails if m.message == "Outcome" and m.receiver is SPECULATOR]
    assert [m.round_id for m in outcomes] == list(range(finished.metrics.num_rounds - 1))
    assert all(mail.sent_ns <= mail.taken_ns <= mail.received_ns for mail in timeline.mails)


def test_the_command_writes_trace_tables_and_picture(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = main(
        [
            "conf=saguaro_tree",
            f"model.path={model}",
            "model.dtype=float32",
            "prompt=hello",
            "max_tokens=30",
            "seed=1",
            "out=found",
            "rounds=3",
            "speculation.plan=fixed",
            "speculation.draft.layers=3",
        ]
    )
    captured = capsys.readouterr()
    assert status == 0
    assert sorted(path.name for path in Path("found").iterdir()) == [
        "rounds.png",
        "summary.json",
        "summary.md",
        "trace.json",
    ]
    summary = json.loads(Path("found/summary.json").read_text("utf-8"))
    assert summary["num_rounds"] == len(summary["rounds"]) > 0
    assert "## " not in captured.out
    assert "decode rounds" in captured.err
    assert Path("found/rounds.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("found/trace.json").read_text("utf-8"))["traceEvents"]


def test_a_running_engine_is_profiled_from_outside_more_than_once(engine, tmp_path):
    (run,) = [Path(path) for path in traces()]
    profiles = []
    has_generated = threading.Event()

    def attach() -> None:
        with ProfileClient(find_run(str(run))) as client:
            for _ in range(2):
                client.start(num_spans=100_000, traces_kernels=False)
                has_generated.clear()
                assert has_generated.wait(60)
                profiles.append(client.end())

    attached = threading.Thread(target=attach)
    attached.start()
    number = 0
    while attached.is_alive():
        generate(engine, max_tokens=20, request_id=f"attached {number}")
        has_generated.set()
        number += 1
    attached.join()
    assert not make_timeline(engine.end_profile()).spans[VERIFIER]
    assert len(profiles) == 2
    for profile in profiles:
        assert find_rounds(make_timeline(profile))
    settings, _ = split_settings([f"out={tmp_path}", "attach=any"])
    write_files(settings, profiles[0])
    assert (tmp_path / "rounds.png").exists()


def test_a_second_profiler_takes_over_and_the_first_is_told():
    before = traces()
    with supervise({TOKENIZER: "Echo"}) as supervisor:
        (run,) = [Path(path) for path in traces() - before]
        first_reason: list[str] = []
        second_profile: list[EngineProfile] = []

        def attach() -> None:
            with ProfileClient(run) as first, ProfileClient(run) as second:
                first.start(num_spans=1000, traces_kernels=False)
                second.start(num_spans=1000, traces_kernels=False)
                try:
                    first.end()
                except RequestError as error:
                    first_reason.append(str(error))
                second_profile.append(second.end())

        attached = threading.Thread(target=attach)
        attached.start()
        number = 0
        while attached.is_alive():
            supervisor.send(TOKENIZER, Item(number=number))
            collect(supervisor, 1)
            number += 1
        attached.join()
    assert "another profiler attached in the meantime" in first_reason[0]
    assert list(second_profile[0].stages[TOKENIZER].spans.spans())


def test_kernels_are_traced_inside_target_and_draft_on_the_same_clock(engine):
    engine.start_profile(num_spans=100_000, traces_kernels=True)
    generate(engine, max_tokens=4)
    profile = engine.end_profile()
    timeline = make_timeline(profile)
    assert profile.stages[PREDICTOR].kernel_trace is None
    for stage, kinds in ((VERIFIER, (SpanKind.PREFILL, SpanKind.VERIFY)), (SPECULATOR, (SpanKind.BRANCH,))):
        trace = profile.stages[stage].kernel_trace
        assert trace is not None
        kernels = [kernel for kernel in read_kernels(trace) if kernel.category == "cpu_op"]
        for span in timeline.of_kind(stage, *kinds):
            inside = [k for k in kernels if span.start_ns <= k.start_ns <= span.end_ns]
            assert len(inside) > 10
            # Operators do not straddle the ends of a forward: the clocks agree to some microseconds.
            slack_ns = 50_000
            assert all(k.start_ns + k.duration_ns <= span.end_ns + slack_ns for k in inside)


def test_an_engine_without_a_profile_has_no_ring_and_answers_with_nothing():
    with supervise({TOKENIZER: "Echo"}) as engine:
        engine.send(TOKENIZER, Item(number=1))
        collect(engine, 1)
        profile = engine.end_profile()
    assert {name: stage.spans.records for name, stage in profile.stages.items()} == {
        StageName.FRONTEND: b"",
        TOKENIZER: b"",
    }


def test_attaching_to_nothing_says_what_runs():
    with pytest.raises(ConfigError, match="names no running engines, expected one; running: "):
        find_run("999999999")
