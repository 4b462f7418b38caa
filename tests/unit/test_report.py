"""The closing table adds up what the requests report, and shows `-` for what a run does not define."""

import re
from dataclasses import dataclass

from pipeline.messages import StageName
from pipeline.report import closing_table
from tests.fake_frontend_events import NO_SPECULATION, PLANNED, finished


@dataclass
class Busy:
    busy_ns: int


def figures(table):
    """Name and value of each line; names have single spaces, columns are at least two apart."""
    return {(parts := re.split(r" {2,}", line))[0]: parts[1] for line in table.splitlines()}


def test_figures_of_all_requests_are_added_before_they_are_divided():
    requests = [finished("0"), finished("1", metrics=NO_SPECULATION, num_output_tokens=1)]
    stages = {StageName.VERIFIER: Busy(24_000_000), StageName.SPECULATOR: Busy(6_000_000)}
    table = closing_table(requests, stages, wall_seconds=2.0)
    assert figures(table) == {
        "requests": "2",
        "tokens": "32",
        "tokens/s": "100.0",
        "time to first token": "15.0",
        "rounds": "12",
        "acceptance length": "2.67",
        "acceptance rate": "0.500",
        "hit rate": "0.800",
        "ready length": "3.50",
        "round": "30.00",
        "target computed": "20.00",
        "target waited": "5.00",
        "target and draft at once": "15.00",
        "overhead": "0.50",
        "target-verifier busy": "2.00",
        "draft-speculator busy": "0.50",
    }


def test_the_table_says_whether_the_bonus_token_counts():
    lines = closing_table([finished()], {}, wall_seconds=1.0).splitlines()
    (length,) = [line for line in lines if line.startswith("acceptance length")]
    (rate,) = [line for line in lines if line.startswith("acceptance rate")]
    assert "bonus token included" in length
    assert "bonus token not included" in rate


def test_the_planners_figures_are_those_of_the_last_request_and_its_rests_of_all():
    table = figures(closing_table([finished(metrics=PLANNED)] * 2, {}, wall_seconds=1.0))
    assert (table["plan: verification"], table["plan: price of time"]) == ("20.50", "80.0")
    assert (table["plan: branches"], table["plan: rested"]) == ("16", "6")
    assert table["plan: hit rate"] == "0.700"


def test_what_a_run_does_not_define_is_a_dash():
    table = figures(
        closing_table([finished(metrics=NO_SPECULATION, num_output_tokens=1)], {}, wall_seconds=1.0)
    )
    undefined = {name for name, value in table.items() if value == "-"}
    assert {
        "tokens/s",
        "acceptance rate",
        "hit rate",
        "ready length",
        "target waited",
        "overhead",
    } <= undefined
    assert table["acceptance length"] == "1.00"


def test_no_requests_make_a_table_without_errors():
    assert figures(closing_table([], {}, wall_seconds=0.0))["requests"] == "0"
