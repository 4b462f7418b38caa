"""A bench as a document, before it is Markdown or HTML: sections of sentences, tables and pictures.

Only puts figures into words. `-` stands for what is undefined, or not shown because tokens were refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.cases import Case
from tools.bench.figures import Figures, set_names
from tools.bench.journal import Journal
from tools.bench.measures import Ratio
from tools.bench.plan import Plan
from tools.bench.plots import Picture
from tools.bench.runner import Outcomes, State
from tools.bench.settings import SetUp
from tools.command_line import name_of
from tools.tables import UNDEFINED, Table, number

_COLUMNS = (
    "system", "tokens/s", "over {baseline}", "95 %", "first token, ms", "between tokens, ms", "p95, ms",
    "acceptance length", "hit rate", "rounds", "target, ms", "waited, ms", "overlap, ms", "overhead, ms",
    "tokens",
)  # fmt: skip
_NOTES = (
    "tokens/s: while decoding, of all requests of a batch together: all tokens after the first block of each "
    "answer, over all seconds from the first block of any answer of a batch to its last. With batches the "
    "prefills of the others lie in that time. Seconds are medians over repeats.",
    "95 %: interval of the ratio, from resampled prompts (bootstrap, fixed seed).",
    "First token: from the question to the first block, median over prompts.",
    "Between tokens: median and 95th percentile over all tokens but the first block; a block of n tokens "
    "that arrives t after the one before counts as n tokens with t / n each.",
    "Acceptance length: tokens a target forward, the bonus token included. Rounds: target forwards on one "
    "pass over the prompts. Both are unknown for vLLM and SGLang.",
    "Hit rate: outcomes with a token drafted ahead, of all outcomes that were looked up.",
    "The ms columns after rounds are of an average decode round of a request: the target's forward and "
    "choices, its waiting, draft and target at once, and what is neither computing nor waiting for a draft.",
    "Tokens: the answers that equal the baseline's. A system that must give the same tokens, and does not, "
    "has no times here.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the document; what it lacks is empty."""

    heading: str
    level: int = 2
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    items: Sequence[str] = ()
    code: str | None = None
    picture: Picture | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The document."""

    title: str
    sections: Sequence[Section]


def make_report(
    plan: Plan,
    figures: Sequence[Figures],
    outcomes: Outcomes,
    journal: Journal,
    *,
    about: Mapping[str, Any],
    pictures: Sequence[Picture],
) -> Report:
    """about: `machine`, `versions`, `load_average` (before, after), `date`, `command`."""
    return Report(
        title=f"{name_of(plan.settings.model or 'demo model')}, {plan.settings.dtype.value}",
        sections=[
            _how(plan, journal, about),
            _set_ups(plan),
            _overview(plan, figures),
            *(Section(heading=p.title, level=3, paragraphs=[p.caption], picture=p) for p in pictures),
            *_case_sections(plan, figures),
            *_without_figures(outcomes),
            _given(plan, journal),
            Section(heading="What the columns mean", items=_NOTES),
        ],
    )


def markdown(report: Report) -> str:
    """The document as Markdown; pictures are linked by name."""
    lines = [f"# {report.title}", ""]
    for section in report.sections:
        lines += [f"{'#' * section.level} {section.heading}", ""]
        for paragraph in section.paragraphs:
            lines += [paragraph, ""]
        if section.code is not None:
            lines += ["```", section.code, "```", ""]
        if section.table is not None:
            lines += [*section.table.markdown_lines(), ""]
        if section.items:
            lines += [*(f"- {item}" for item in section.items), ""]
        if section.picture is not None:
            lines += [f"![{section.heading}]({section.picture.file_name})", ""]
    return "\n".join(lines)


def _how(plan: Plan, journal: Journal, about: Mapping[str, Any]) -> Section:
    settings, machine = plan.settings, about["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    paragraphs = [
        f"{about['date']}; {machine['processor']}, usable cores {machine['usable_cores']}; load average "
        f"before and after: {', '.join(about['load_average'])}. {packages}.",
        f"At most {settings.max_tokens} tokens an answer, seeds from {settings.seed}, {settings.repeats} "
        f"repeat{'s' if settings.repeats > 1 else ''}, the systems in turns on every prompt; baseline "
        f"{plan.baseline.label}.",
    ]
    if len(journal.sources) > 1:
        paragraphs.append(
            f"The engine's source changed on the way: {len(journal.sources)} versions are mixed."
        )
    return Section(heading="How it was measured", paragraphs=paragraphs, code=about["command"])


def _set_ups(plan: Plan) -> Section:
    measured = plan.settings.setup_list
    return Section(
        heading="Which cores",
        items=[
            f"{setup.value}{'' if setup in measured else ' (not measured here)'}: {setup.meaning}."
            for setup in SetUp
        ],
    )


def _overview(plan: Plan, figures: Sequence[Figures]) -> Section:
    """Speed of every system in every case, on all sets together."""
    name = set_names(plan)[-1]
    by_place = {(f.case, f.label): f for f in figures if f.set_name == name}
    rows = [
        [system.label, *(_speed(by_place.get((case, system.label))) for case in plan.cases)]
        for system in plan.systems
    ]
    return Section(
        heading="Overview",
        paragraphs=[f"Tokens/s on {name}; in brackets over {plan.baseline.label} in the same column."],
        table=Table(head=["system", *map(str, plan.cases)], rows=rows),
    )


def _case_sections(plan: Plan, figures: Sequence[Figures]) -> list[Section]:
    sections = []
    for case in plan.cases:
        sections.append(Section(heading=str(case), paragraphs=_about_batches(plan, case)))
        for name in set_names(plan):
            of_set = [f for f in figures if (f.case, f.set_name) == (case, name)]
            if of_set:
                head = [column.format(baseline=plan.baseline.label) for column in _COLUMNS]
                table = Table(head=head, rows=[_cells(entry) for entry in of_set])
                count = of_set[0].num_prompts
                heading = f"{name}: {count} prompt{'s' if count > 1 else ''}"
                sections.append(Section(heading=heading, level=3, table=table))
    return sections


def _about_batches(plan: Plan, case: Case) -> list[str]:
    size = case.phase.batch_size
    if size == 1:
        return []
    small = [len(group) for group in plan.groups(size) if len(group) < size]
    text = f"{size} requests of a set are asked at once, and the next {size} when all are answered"
    return [f"{text}; {len(small)} groups are smaller." if small else f"{text}."]


def _without_figures(outcomes: Outcomes) -> list[Section]:
    items = [
        f"{label}, {phase}: {outcome.state.value}: {outcome.reason}"
        for (phase, label), outcome in outcomes.items()
        if outcome.state is not State.answered
    ]
    return [Section(heading="Without figures", items=items)] if items else []


def _given(plan: Plan, journal: Journal) -> Section:
    items = [
        f"{system.label}, {phase}: {journal.given[system.label, phase]}"
        for system in plan.systems
        for phase in plan.phases
        if (system.label, phase) in journal.given
    ]
    return Section(heading="What each was given", items=items)


def _speed(entry: Figures | None) -> str:
    if entry is None:
        return UNDEFINED
    if entry.tokens.is_refused:
        return "refused"
    ratio = "" if entry.ratio is None else f" ({entry.ratio.value:.2f})"
    return number(entry.tokens_per_second, 1) + ratio


def _cells(entry: Figures) -> list[str]:
    rounds, gaps = entry.rounds, entry.token_gaps
    times: list[float | None] = [None] * 4
    if rounds is not None:
        times = [rounds.target_ms, rounds.wait_ms, rounds.overlap_ms, rounds.overhead_ms]
    return [
        entry.label,
        number(entry.tokens_per_second, 1),
        number(None if entry.ratio is None else entry.ratio.value, 2),
        _interval(entry.ratio),
        number(entry.ttft_ms, 0),
        number(None if gaps is None else gaps.median_ms, 1),
        number(None if gaps is None else gaps.p95_ms, 1),
        number(entry.acceptance_length, 2),
        number(entry.hit_rate, 2),
        number(None if rounds is None else rounds.num_rounds, 0),
        *(number(time, 2) for time in times),
        str(entry.tokens),
    ]


def _interval(ratio: Ratio | None) -> str:
    if ratio is None or ratio.interval is None:
        return UNDEFINED
    return f"{ratio.interval[0]:.2f} to {ratio.interval[1]:.2f}"
