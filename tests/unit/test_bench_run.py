"""Running a plan with fake workers: turns, losses, refusals, and going on after a kill."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.schema import WeightFormat
from pipeline.errors import ConfigError
from tests.bench_plans import FakeWorkers, Reply, lost, make_answer, make_metrics, make_plan
from tools.bench.figures import ALL_SETS, Figures, all_figures
from tools.bench.files import results, write_files
from tools.bench.journal import FILE_NAME, Journal
from tools.bench.plan import Plan
from tools.bench.protocol import Answer, EngineSpec, Question
from tools.bench.report import make_report, markdown
from tools.bench.runner import Outcome, Runner, State

IDENTITY = {"machine": "this", "versions": {"torch": "1"}, "cores": (0, 1)}
ABOUT = {
    "machine": {"processor": "A processor", "usable_cores": [0, 1]},
    "versions": {},
    "load_average": ["0.10", "0.90"],
    "date": "2000-01-01",
    "command": "python -m tools.bench out=x",
}


def run(
    folder: Path, plan: Plan, replies: dict[str, Reply | str] | None = None
) -> tuple[FakeWorkers, dict[str, Outcome], dict[str, Figures]]:
    """Run a plan of one set and one case; outcomes and figures by label. Writes the report, too."""
    workers = FakeWorkers(plan, replies)
    with Journal(folder, IDENTITY) as journal:
        outcomes = Runner(plan, journal, source="s1", open_worker=workers).run()
        figures = all_figures(plan, journal)
        report = make_report(plan, figures, outcomes, journal, about=ABOUT, pictures=[])
        write_files(folder, report, results(plan, figures, outcomes, journal, about=ABOUT), [])
    assert all(worker.is_closed for worker in workers.opened)
    by_label = {label: outcome for (_, label), outcome in outcomes.items()}
    return workers, by_label, {entry.label: entry for entry in figures}


def table_rows(folder: Path) -> dict[str, dict[str, str]]:
    """Cells of the last table in table.md by system and column."""
    text = (folder / "table.md").read_text().rpartition("\n### ")[2]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def table_text(folder: Path) -> str:
    return (folder / "table.md").read_text()


def read_results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return content


def test_systems_take_turns_after_one_warm_up_each_and_start_anew_for_each_repeat(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd,saguaro", num_prompts=2, repeats=2)
    workers, outcomes, _ = run(tmp_path, plan)
    names = ("autoregressive", "ssd", "saguaro")
    assert [worker.label for worker in workers.opened] == [*names, *names]
    first = dict(zip(names, "abc", strict=True))
    for asked, order in ((workers.asked[:9], "abcbca"), (workers.asked[9:], "bcacab")):
        warm_ups, measured = asked[:3], asked[3:]
        assert warm_ups == [(name, "question 0") for name in names]
        assert "".join(first[label] for label, _ in measured) == order
        assert [text[-1] for _, text in measured] == list("000111")
    assert set(outcomes.values()) == {Outcome(state=State.answered)}


def test_the_table_and_the_results_hold_the_figures(tmp_path: Path) -> None:
    metrics = make_metrics(
        num_rounds=3, target_compute_ms=30.0, target_wait_ms=4.0, overlap_ms=25.0, overhead_ms=1.0
    )

    def twice_as_fast(question: Question, call: int) -> Answer:
        return make_answer(seconds=1.0, ttft_ms=40.0, num_rounds=3, metrics=metrics)

    run(tmp_path, make_plan("autoregressive,saguaro", repeats=3), {"saguaro": twice_as_fast})
    assert table_rows(tmp_path)["saguaro"] == {
        "system": "saguaro",
        "tokens/s": "4.0",
        "over autoregressive": "2.00",
        "95 %": "2.00 to 2.00",
        "first token, ms": "40",
        "between tokens, ms": "250.0",
        "p95, ms": "250.0",
        "acceptance length": "1.67",
        "hit rate": "0.80",
        "rounds": "6",
        "target, ms": "15.00",
        "waited, ms": "2.00",
        "overlap, ms": "12.50",
        "overhead, ms": "0.50",
        "tokens": "6 of 6 identical",
    }
    content = read_results(tmp_path)
    assert len(content["answers"]) == 12
    assert content["answers"][0]["answers"][0]["token_ids"] == [1, 2, 3, 4, 5]
    assert content["systems"]["saguaro"]["phases"][0]["given"] == "fake saguaro"
    assert content["figures"][1]["ratio"]["value"] == 2.0
    assert "- saguaro, same_total_cores, batch 1: fake saguaro" in (tmp_path / "table.md").read_text()


def test_several_sets_have_a_table_each_and_one_together(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", sets=("code", "chat"), num_prompts=3, repeats=1)
    with Journal(tmp_path, IDENTITY) as journal:
        Runner(plan, journal, source="s1", open_worker=FakeWorkers(plan)).run()
        figures = all_figures(plan, journal)
    assert [(entry.set_name, entry.label, entry.num_prompts) for entry in figures] == [
        ("code", "autoregressive", 3),
        ("code", "ssd", 3),
        ("chat", "autoregressive", 3),
        ("chat", "ssd", 3),
        (ALL_SETS, "autoregressive", 6),
        (ALL_SETS, "ssd", 6),
    ]


def other_tokens(question: Question, call: int) -> Answer:
    """Differs at the second prompt only."""
    metrics = make_metrics()
    return make_answer(
        [1, 2, 3, 4, 5] if question.seed == 0 else [1, 2, 3, 4, 6], num_rounds=2, metrics=metrics
    )


def test_a_speed_is_refused_when_tokens_of_ours_differ(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd,saguaro", num_prompts=2, repeats=2)
    _, outcomes, figures = run(tmp_path, plan, {"ssd": other_tokens})
    assert outcomes["ssd"].state is State.answered
    refused = figures["ssd"]
    assert (refused.tokens_per_second, refused.ratio, refused.ttft_ms, refused.rounds) == (
        None,
        None,
        None,
        None,
    )
    row = table_rows(tmp_path)["ssd"]
    assert row["tokens"] == "refused: 2 of 4 answers differ"
    assert (row["tokens/s"], row["target, ms"], row["acceptance length"]) == ("-", "-", "2.50")
    assert table_rows(tmp_path)["saguaro"]["tokens/s"] == "2.0"


def test_another_law_is_compared_with_its_own_plain_decoding(tmp_path: Path) -> None:
    int8 = "+model.weights=int8"
    plan = make_plan(f"autoregressive,saguaro,p8=autoregressive{int8},s8=saguaro{int8}", repeats=1)
    for system in plan.systems[2:]:
        assert isinstance(system.spec, EngineSpec)
        system.spec.config.model.weights = WeightFormat.int8
    _, _, figures = run(tmp_path, plan, {"p8": other_tokens, "s8": other_tokens})
    assert str(figures["saguaro"].tokens) == "2 of 2 identical"
    assert str(figures["p8"].tokens) == str(figures["s8"].tokens) == "2 of 2 identical (p8)"
    assert figures["s8"].ratio is not None  # to the baseline, as everybody's
    _, _, figures = run(tmp_path / "again", plan, {"p8": other_tokens})
    assert str(figures["s8"].tokens) == "refused: 1 of 2 answers differ (p8)"
    alone = make_plan(f"autoregressive,s8=saguaro{int8}", repeats=1)
    assert isinstance(alone.systems[1].spec, EngineSpec)
    alone.systems[1].spec.config.model.weights = WeightFormat.int8
    _, _, figures = run(tmp_path / "alone", alone, {"s8": other_tokens})
    assert str(figures["s8"].tokens) == "not compared: no answers to compare with"


@pytest.mark.parametrize(
    ("dtype", "speed", "tokens"),
    [("bfloat16", "2.0", "2 of 4 identical"), ("float32", "-", "refused: 2 of 4 answers differ")],
)
def test_a_peer_may_round_in_bfloat16_but_not_in_float32(
    tmp_path: Path, dtype: str, speed: str, tokens: str
) -> None:
    plan = make_plan("autoregressive,transformers", num_prompts=2, repeats=2)
    plan.settings.dtype = type(plan.settings.dtype)[dtype]
    run(tmp_path, plan, {"transformers": other_tokens})
    row = table_rows(tmp_path)["transformers"]
    assert (row["tokens/s"], row["tokens"]) == (speed, tokens)


def test_a_baseline_that_contradicts_itself_gives_no_ratios(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", num_prompts=1, repeats=2)
    calls: list[int] = []

    def changing(question: Question, call: int) -> Answer:
        calls.append(call)
        return make_answer([7, 8] if calls == [1, 2, 1, 2] else [1, 2, 3, 4, 5])  # each call 1 is a warm-up

    run(tmp_path, plan, {"autoregressive": changing})
    rows = table_rows(tmp_path)
    assert rows["autoregressive"]["tokens"] == "refused: 1 of 2 answers differ"
    assert (rows["ssd"]["tokens/s"], rows["ssd"]["over autoregressive"]) == ("2.0", "-")


def test_what_failed_or_is_not_here_is_not_started_again_for_the_next_repeat(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd,llama_cpp", num_prompts=2, repeats=3)
    replies: dict[str, Reply | str] = {
        "ssd": lost("was ended by SIGKILL", at_call=2),
        "llama_cpp": "not here",
    }
    workers, outcomes, figures = run(tmp_path, plan, replies)
    labels = [worker.label for worker in workers.opened]
    assert [labels.count(name) for name in ("autoregressive", "ssd", "llama_cpp")] == [3, 1, 1]
    assert (outcomes["ssd"].state, outcomes["llama_cpp"].state) == (State.failed, State.skipped)
    assert set(figures) == {"autoregressive"}


def test_a_lost_worker_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd,saguaro", num_prompts=3, repeats=1)
    _, outcomes, figures = run(tmp_path, plan, {"ssd": lost("was ended by SIGKILL", at_call=3)})
    assert outcomes["ssd"].state is State.failed
    assert set(figures) == {"autoregressive", "saguaro"}
    assert (
        "- ssd, same_total_cores, batch 1: failed: at a 1: was ended by SIGKILL"
        in (tmp_path / "table.md").read_text()
    )
    assert read_results(tmp_path)["systems"]["ssd"]["phases"][0]["state"] == "failed"


def test_a_lost_baseline_leaves_speeds_and_says_that_tokens_were_not_compared(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", num_prompts=2, repeats=1)
    run(tmp_path, plan, {"autoregressive": lost("no answer within 1 s", at_call=1)})
    row = table_rows(tmp_path)["ssd"]
    assert (row["tokens/s"], row["over autoregressive"]) == ("2.0", "-")
    assert row["tokens"] == "not compared: no answers to compare with"


def test_a_peer_that_is_not_here_is_skipped_with_its_reason(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,llama_cpp", num_prompts=2, repeats=1)
    workers, outcomes, figures = run(tmp_path, plan, {"llama_cpp": "llama_cpp cannot be imported"})
    assert outcomes["llama_cpp"].state is State.skipped
    assert set(figures) == {"autoregressive"}
    assert "- llama_cpp, same_total_cores, batch 1: skipped: llama_cpp cannot be imported" in table_text(
        tmp_path
    )
    assert [label for label, _ in workers.asked] == ["autoregressive"] * 3


def test_a_system_that_read_another_prompt_has_failed(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,transformers", num_prompts=1, repeats=1)
    other: Reply = lambda question, call: make_answer(num_prompt_tokens=4)  # noqa: E731
    _, outcomes, _ = run(tmp_path, plan, {"transformers": other})
    assert outcomes["transformers"].reason == "at a 0: it read 4 prompt tokens, the others 3"


def test_a_killed_run_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", num_prompts=2, repeats=2)

    calls: list[int] = []

    def killed(question: Question, call: int) -> Answer:
        calls.append(call)
        if calls == [1, 2, 3, 1, 2]:  # in the second repeat, its warm-up behind it
            raise KeyboardInterrupt
        return make_answer()

    workers = FakeWorkers(plan, {"ssd": killed})
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path, IDENTITY) as journal:
        Runner(plan, journal, source="s1", open_worker=workers).run()
    assert all(worker.is_closed for worker in workers.opened)
    done = len(workers.asked) - 5  # twice two warm-ups, and the one that was killed
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"type":"Row","set_name":"a","ind')  # cut short by the kill
    again, outcomes, figures = run(tmp_path, plan)
    assert len(again.asked) - 2 == 8 - done
    assert set(outcomes.values()) == {Outcome(state=State.answered)}
    assert len(figures) == 2
    finished, _, _ = run(tmp_path, plan)
    assert finished.opened == []
    more, _, _ = run(tmp_path, replace(plan, settings=replace(plan.settings, repeats=3)))
    assert len(more.asked) - 2 == 4


def test_answers_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    with Journal(tmp_path, IDENTITY):
        pass
    with (
        pytest.raises(
            ConfigError, match=r"answers of another run \(other: cores, versions\); .* or delete it$"
        ),
        Journal(tmp_path, {**IDENTITY, "versions": {"torch": "2"}, "cores": (0,)}),
    ):
        pass
    with Journal(tmp_path, IDENTITY) as journal:
        assert journal.rows == {}


def test_a_changed_source_is_accepted_on_demand_and_the_report_says_so(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", num_prompts=1, repeats=2)
    for source, repeats in (("s1", 1), ("s2", 2)):
        part = replace(plan, settings=replace(plan.settings, repeats=repeats))
        with Journal(tmp_path, {**IDENTITY, "source": source}, may_differ=("source",)) as journal:
            outcomes = Runner(part, journal, source=source, open_worker=FakeWorkers(part)).run()
            report = make_report(
                part, all_figures(part, journal), outcomes, journal, about=ABOUT, pictures=[]
            )
    assert "2 versions are mixed" in markdown(report)
    with pytest.raises(ConfigError, match=r"\(other: source\); .* with mix_sources=true$"):
        Journal(tmp_path, {**IDENTITY, "source": "s2"})


def test_a_file_that_is_no_journal_or_in_use_is_refused(tmp_path: Path) -> None:
    with (
        Journal(tmp_path, IDENTITY),
        pytest.raises(ConfigError, match="in use by another bench"),
        Journal(tmp_path, IDENTITY),
    ):
        pass
    (tmp_path / FILE_NAME).write_text('{"prompt": "mine"}\n')
    with pytest.raises(ConfigError, match=r"answers.jsonl:1 was not written by this bench"):
        Journal(tmp_path, IDENTITY)
    assert (tmp_path / FILE_NAME).read_text() == '{"prompt": "mine"}\n'
