"""What a bench leaves behind: a Markdown table for people, results.json for programs.

Only formats. `-` stands for what is undefined, or not shown because the tokens were refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from tools.bench.figures import Figures
from tools.bench.journal import Journal
from tools.bench.measures import Ratio
from tools.bench.plan import Plan
from tools.bench.runner import Outcome, State

_UNDEFINED = "-"
_COLUMNS = (
    "system", "tokens/s", "over {baseline}", "95 %", "first token, ms", "acceptance length", "hit rate",
    "rounds", "target, ms", "waited, ms", "overlap, ms", "overhead, ms", "tokens",
)  # fmt: skip
_NOTES = """\
tokens/s: while decoding, without the prefill; all tokens over all seconds, each prompt's seconds the median
of its repeats. 95 %: interval of the ratio, from resampled prompts. First token: median over prompts.
Acceptance length: tokens a target forward, the bonus token included. Rounds: target forwards on one pass over
the prompts. The ms columns are of an average decode round: the target's forward and choices, its waiting,
draft and target at once, and what is neither computing nor waiting for a draft. Tokens: the answers that
equal the baseline's."""


def markdown(
    plan: Plan,
    figures: Sequence[Figures],
    outcomes: Mapping[str, Outcome],
    journal: Journal,
    about: Mapping[str, Any],
) -> str:
    """The whole report. about: `machine`, `versions` and `load_average` (before, after)."""
    settings = plan.settings
    choice = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    lines = [
        f"# {settings.setup.value}: {settings.model or 'demo model'}, {settings.dtype.value}, {choice}",
        "",
        f"At most {settings.max_tokens} tokens an answer, seed {settings.seed}, {settings.repeats} repeats "
        f"in turns, baseline {plan.baseline.label}.",
        f"{about['machine']['processor']}, cores {about['machine']['usable_cores']}; load average before and "
        f"after: {', '.join(about['load_average'])}.",
        "",
    ]
    if len(journal.sources) > 1:
        lines += [f"The engine's source changed on the way: {len(journal.sources)} versions are mixed.", ""]
    for name in dict.fromkeys(entry.set_name for entry in figures):
        of_set = [entry for entry in figures if entry.set_name == name]
        lines += [f"## {name}: {of_set[0].num_prompts} prompts", ""]
        header = [column.format(baseline=plan.baseline.label) for column in _COLUMNS]
        lines += [_row(header), _row(["---"] * len(header))]
        lines += [_row(_cells(entry)) for entry in of_set]
        lines.append("")
    missing = {label: outcome for label, outcome in outcomes.items() if outcome.state is not State.answered}
    if missing:
        lines += ["## Without figures", ""]
        lines += [f"- {label}: {outcome.state.value}: {outcome.reason}" for label, outcome in missing.items()]
        lines.append("")
    lines += ["## What each was given", ""]
    lines += [
        f"- {system.label}: {journal.given[system.label]}"
        for system in plan.systems
        if system.label in journal.given
    ]
    lines += ["", _NOTES]
    return "\n".join(lines) + "\n"


def results(
    plan: Plan,
    figures: Sequence[Figures],
    outcomes: Mapping[str, Outcome],
    journal: Journal,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything, answers included, as JSON can hold it."""
    return {
        "settings": msgspec.to_builtins(plan.settings),
        "baseline": plan.baseline.label,
        "sources": sorted(journal.sources),
        **about,
        "systems": {
            system.label: {
                "name": system.entry.name,
                "overrides": list(system.entry.overrides),
                "state": outcomes[system.label].state.value,
                "reason": outcomes[system.label].reason,
                "given": journal.given.get(system.label),
                "worker": msgspec.to_builtins(system.spec),
            }
            for system in plan.systems
        },
        "figures": [
            {**asdict(entry), "tokens": {**asdict(entry.tokens), "text": str(entry.tokens)}}
            for entry in figures
        ],
        "prompts": [
            {"set_name": p.set_name, "index": p.index, **msgspec.to_builtins(p.question)}
            for p in plan.prompts
        ],
        "answers": [msgspec.to_builtins(row) for row in journal.rows.values()],
    }


def write_files(folder: Path, table: str, content: Mapping[str, Any]) -> None:
    """table.md and results.json, each complete or as it was."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    for name, body in (("table.md", table), ("results.json", text)):
        scratch = folder / f"{name}.partial"
        scratch.write_text(body, encoding="utf-8")
        os.replace(scratch, folder / name)


def _cells(entry: Figures) -> list[str]:
    rounds = entry.rounds
    times: list[float | None] = [None] * 4
    if rounds is not None:
        times = [rounds.target_ms, rounds.wait_ms, rounds.overlap_ms, rounds.overhead_ms]
    return [
        entry.label,
        _number(entry.tokens_per_second, 1),
        _number(None if entry.ratio is None else entry.ratio.value, 2),
        _interval(entry.ratio),
        _number(entry.ttft_ms, 0),
        _number(entry.acceptance_length, 2),
        _number(entry.hit_rate, 2),
        _number(None if rounds is None else rounds.num_rounds, 0),
        *(_number(time, 2) for time in times),
        str(entry.tokens),
    ]


def _interval(ratio: Ratio | None) -> str:
    if ratio is None or ratio.interval is None:
        return _UNDEFINED
    return f"{ratio.interval[0]:.2f} to {ratio.interval[1]:.2f}"


def _number(value: float | None, digits: int) -> str:
    return _UNDEFINED if value is None else f"{value:.{digits}f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
