"""Set-ups, temperatures and batch sizes of a bench with fake workers, and the report that comes of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conf.schema import Verification
from tests.bench_plans import FakeWorkers, Reply, make_answer, make_peer, make_plan
from tools.bench.cases import Case, Phase
from tools.bench.figures import Figures, all_figures
from tools.bench.files import results, write_files
from tools.bench.journal import Journal
from tools.bench.plan import Plan, PlannedSystem
from tools.bench.plots import Picture, draw_all
from tools.bench.protocol import Answer, EngineSpec, PeerSpec, Question
from tools.bench.report import make_report
from tools.bench.runner import Outcomes, Runner, State
from tools.bench.settings import SetUp

IDENTITY = {"machine": "this"}
ABOUT = {
    "machine": {"processor": "A <fast> processor", "usable_cores": [0, 1]},
    "versions": {"torch": "1"},
    "load_average": ["0.10", "0.90"],
    "date": "2000-01-01",
    "command": "python -m tools.bench out=x",
}
FOUR_CASES = {"temperatures": "0,1", "batch_sizes": "1,2", "repeats": 1}


def run(
    folder: Path, plan: Plan, replies: dict[str, Reply | str] | None = None, *, draws: bool = False
) -> tuple[FakeWorkers, Outcomes, list[Figures]]:
    """Run a plan and write its report. draws: also the pictures, which takes a second."""
    workers = FakeWorkers(plan, replies)
    with Journal(folder, IDENTITY) as journal:
        outcomes = Runner(plan, journal, source="s1", open_worker=workers).run()
        figures = all_figures(plan, journal)
        pictures = draw_all(plan, figures) if draws else []
        report = make_report(plan, figures, outcomes, journal, about=ABOUT, pictures=pictures)
        write_files(folder, report, results(plan, figures, outcomes, journal, about=ABOUT), pictures)
    return workers, outcomes, figures


def three_tokens(question: Question, call: int) -> Answer:
    return make_answer([1, 2, 3], blocks=[(0.25, 1), (1.25, 2)])


def test_every_batch_size_has_its_workers_and_every_temperature_its_turns(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", num_prompts=3, **FOUR_CASES)
    workers, _, figures = run(tmp_path, plan)
    assert [worker.label for worker in workers.opened] == ["autoregressive", "ssd"] * 2
    sizes = [(len(batch.questions), batch.temperature) for _, batch in workers.batches]
    alone = [(1, 0.0)] * 2 + [(1, 0.0)] * 6 + [(1, 1.0)] * 6
    pairs = [(2, 0.0), (2, 0.0), (1, 0.0), (1, 0.0)]
    assert sizes[:14] == alone
    assert sizes[14:] == [(2, 0.0)] * 2 + pairs + [(size, 1.0) for size, _ in pairs]
    assert [entry.num_prompts for entry in figures] == [3] * 8
    assert {entry.tokens.num_answers for entry in figures} == {3}


def test_the_speed_of_a_batch_is_that_of_its_requests_together(tmp_path: Path) -> None:
    plan = make_plan("autoregressive", num_prompts=4, batch_sizes="1,4", repeats=1)
    _, _, (alone, together) = run(tmp_path, plan, {"autoregressive": three_tokens})
    assert (alone.case.phase.batch_size, alone.tokens_per_second) == (1, 2.0)
    assert (together.case.phase.batch_size, together.tokens_per_second) == (4, 8.0)
    assert alone.token_gaps == together.token_gaps


def test_a_group_is_of_one_set(tmp_path: Path) -> None:
    plan = make_plan("autoregressive", sets=("a", "b"), num_prompts=3, batch_sizes="2")
    groups = [[(prompt.set_name, prompt.index) for prompt in group] for group in plan.groups(2)]
    assert groups == [[("a", 0), ("a", 1)], [("a", 2)], [("b", 0), ("b", 1)], [("b", 2)]]


def test_a_run_that_was_killed_goes_on_and_more_cases_are_added_to_it(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", num_prompts=3, **FOUR_CASES)

    def killed(question: Question, call: int) -> Answer:
        if call == 2 and len(workers.opened) == 4:  # the first pair after the second phase's warm-up
            raise KeyboardInterrupt
        return make_answer()

    workers = FakeWorkers(plan, {"ssd": killed})
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path, IDENTITY) as journal:
        Runner(plan, journal, source="s1", open_worker=workers).run()
    assert all(worker.is_closed for worker in workers.opened)
    again, _, figures = run(tmp_path, plan)
    assert len(figures) == 8
    with Journal(tmp_path, IDENTITY) as journal:
        assert len(journal.rows) == 2 * (2 * 3 + 2 * 2)
    done = len(workers.batches) - 4 - 1  # but for four warm-ups, and the one that was killed
    assert done == 12 + 1
    assert len(again.batches) - 2 == 20 - done
    warmer = make_plan("autoregressive,ssd", num_prompts=3, **{**FOUR_CASES, "temperatures": "0,1,0.5"})
    more, _, _ = run(tmp_path, warmer)
    assert {batch.temperature for _, batch in more.batches[2:8]} == {0.5}
    assert len(more.batches) - len(more.opened) == 2 * (3 + 2)


def test_tokens_are_compared_case_by_case(tmp_path: Path) -> None:
    """Wrong in pairs only: the speed of one request at a time is shown."""
    plan = make_plan("autoregressive,ssd", num_prompts=2, batch_sizes="1,2", repeats=1)
    workers = FakeWorkers(plan)

    def wrong_in_pairs(question: Question, call: int) -> Answer:
        is_pair = len(workers.batches[-1][1].questions) == 2
        return make_answer([1, 2, 9] if is_pair else [1, 2, 3])

    workers = FakeWorkers(plan, {"ssd": wrong_in_pairs, "autoregressive": three_tokens})
    with Journal(tmp_path, IDENTITY) as journal:
        Runner(plan, journal, source="s1", open_worker=workers).run()
        figures = [entry for entry in all_figures(plan, journal) if entry.label == "ssd"]
    alone, pair = figures
    assert (str(alone.tokens), alone.tokens_per_second) == ("2 of 2 identical", 1.0)
    assert str(pair.tokens) == "refused: 2 of 2 answers differ"
    assert (pair.tokens_per_second, pair.ratio, pair.ttft_ms, pair.token_gaps, pair.rounds) == (None,) * 5


def test_the_rejection_rule_is_not_compared_where_tokens_are_drawn(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", temperatures="0,1", num_prompts=1, repeats=1)
    spec = plan.system("ssd").spec
    assert isinstance(spec, EngineSpec)
    spec.config.speculation.verification = Verification.rejection
    _, _, figures = run(tmp_path, plan, {"ssd": three_tokens})
    greedy, sampled = [entry for entry in figures if entry.label == "ssd"]
    assert (str(greedy.tokens), greedy.tokens_per_second) == ("refused: 1 of 1 answers differ", None)
    assert (str(sampled.tokens), sampled.tokens_per_second) == ("not compared: other draws", 2.0)


def test_a_peer_without_batches_is_asked_one_at_a_time_only(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,transformers,vllm", num_prompts=2, batch_sizes="1,2", repeats=1)
    workers, outcomes, _ = run(tmp_path, plan, {"vllm": "vllm cannot be imported"})
    states = {(phase.batch_size, label): outcome.state for (phase, label), outcome in outcomes.items()}
    assert states[1, "transformers"] is State.answered
    assert states[2, "transformers"] is states[1, "vllm"] is states[2, "vllm"] is State.skipped
    # What is not here is not looked for again.
    assert [worker.label for worker in workers.opened].count("vllm") == 1
    text = (tmp_path / "table.md").read_text()
    assert "- transformers, same_total_cores, batch 2: skipped: it is asked one request at a time" in text


def test_a_specification_follows_its_phase() -> None:
    plan = make_plan("autoregressive,vllm")
    phase = Phase(setup=SetUp.same_target_cores, batch_size=4)
    ours, peer = (system.spec_for(phase) for system in plan.systems)
    assert isinstance(ours, EngineSpec)
    assert (ours.config.max_requests, ours.config.placement.name) == (4, "cpu_split")
    assert ours.config.placement.target_cores == 1
    assert isinstance(peer, PeerSpec)
    assert (peer.batch_size, len(peer.cores)) == (4, 1)
    shared = PlannedSystem(entry=plan.systems[1].entry, spec=make_peer("vllm")).spec_for(
        replace(phase, setup=SetUp.same_total_cores)
    )
    assert isinstance(shared, PeerSpec)
    assert len(shared.cores) >= len(peer.cores)


class References(HTMLParser):
    """Everything that a page would fetch, and the tags that are still open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open_tags: list[str] = []
        self.num_images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.num_images += tag == "img"
        if tag not in ("meta", "img"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


@pytest.fixture(scope="module")
def two_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run over two sets, four cases and a label that HTML must escape."""
    folder = tmp_path_factory.mktemp("two_sets")
    plan = make_plan("autoregressive,<b>=ssd", sets=("code", "chat"), num_prompts=2, **FOUR_CASES)
    run(folder, plan, {"<b>": lambda question, call: make_answer(seconds=1.0)}, draws=True)
    return folder


def test_the_page_needs_nothing_but_itself(two_sets: Path) -> None:
    page = (two_sets / "report.html").read_text()
    references = References()
    references.feed(page)
    assert references.open_tags == []
    assert references.num_images == 4
    assert all(value.startswith("data:image/png;base64,") for value in references.found)
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "A &lt;fast&gt; processor" in page
    assert "4.0 (2.00)" in page


def test_the_pictures_are_made_and_named_in_the_table(two_sets: Path) -> None:
    text = (two_sets / "table.md").read_text()
    for name in ("speed.png", "token_times.png", "sets.png", "batches.png"):
        assert (two_sets / name).read_bytes().startswith(b"\x89PNG\r\n")
        assert f"({name})" in text
    assert "- same_target_cores (not measured here): every target computes on one core" in text
    assert "| system | same_total_cores, batch 1, greedy | same_total_cores, batch 1, temperature 1 |" in text


def test_a_picture_is_not_drawn_of_times_that_are_refused(tmp_path: Path) -> None:
    plan = make_plan("autoregressive,ssd", num_prompts=1, repeats=1)
    _, _, figures = run(tmp_path, plan, {"ssd": three_tokens})
    refused = [entry for entry in figures if entry.label == "ssd"]
    assert draw_all(plan, refused) == []
    pictures: list[Picture] = draw_all(plan, figures)
    assert [picture.file_name for picture in pictures] == ["speed.png", "token_times.png"]


def test_the_results_hold_case_and_block_times(two_sets: Path) -> None:
    content = json.loads((two_sets / "results.json").read_text())
    assert content["command"] == "python -m tools.bench out=x"
    row = content["answers"][-1]
    assert row["case"] == {
        "phase": {"setup": "same_total_cores", "batch_size": 2},
        "temperature": 1.0,
    }
    assert len(row["answers"]) == 2
    assert len(row["answers"][0]["block_times_s"]) == len(row["answers"][0]["block_tokens"]) == 2


def test_a_case_says_what_it_is() -> None:
    phase = Phase(setup=SetUp.same_target_cores, batch_size=4)
    assert str(Case(phase=phase, temperature=0.0)) == "same_target_cores, batch 4, greedy"
    assert str(Case(phase=phase, temperature=0.7)) == "same_target_cores, batch 4, temperature 0.7"
