"""The figures of every system on every set: what the table shows and results.json keeps.

A system has figures once it has answered everything; one whose tokens are refused has no times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tools.bench.journal import Journal, Row
from tools.bench.measures import (
    Ratio,
    RoundTimes,
    acceptance_length,
    hit_rate,
    round_times,
    speed,
    speed_ratio,
    times_by_prompt,
)
from tools.bench.plan import Plan, PlannedSystem
from tools.bench.token_check import TokenCheck, check_tokens, reference_tokens, rule_between

ALL_SETS = "all sets"
"""What the sets together are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One system on one set. Undefined figures are None."""

    set_name: str
    label: str
    num_prompts: int
    tokens: TokenCheck
    tokens_per_second: float | None
    ratio: Ratio | None
    """Of the speed, to the baseline's."""
    ttft_ms: float | None
    """Time to first token, median over prompts."""
    acceptance_length: float | None
    hit_rate: float | None
    rounds: RoundTimes | None


def all_figures(plan: Plan, journal: Journal) -> list[Figures]:
    """Set by set, and all sets together if there are several; systems in their order."""
    names = list(dict.fromkeys(prompt.set_name for prompt in plan.prompts))
    found = []
    for name in [*names, *([ALL_SETS] if len(names) > 1 else [])]:
        prompts = {(p.set_name, p.index) for p in plan.prompts if name in (p.set_name, ALL_SETS)}
        num_due = len(prompts) * plan.settings.repeats
        rows = {
            system.label: [
                row
                for row in journal.rows.values()
                if row.label == system.label
                and (row.set_name, row.index) in prompts
                and row.repeat < plan.settings.repeats
            ]
            for system in plan.systems
        }
        complete = {label: listed for label, listed in rows.items() if len(listed) == num_due}
        baseline_rows = complete.get(plan.baseline.label, [])
        checks = {
            system.label: _check(plan, system, complete[system.label], baseline_rows)
            for system in plan.systems
            if system.label in complete
        }
        has_ratios = baseline_rows and not checks[plan.baseline.label].is_refused
        found += [
            _figures(name, label, complete[label], tokens, baseline_rows if has_ratios else [])
            for label, tokens in checks.items()
        ]
    return found


def _check(
    plan: Plan, system: PlannedSystem, rows: Sequence[Row], baseline_rows: Sequence[Row]
) -> TokenCheck:
    settings = plan.settings
    rule = rule_between(system.entry, plan.baseline, dtype=settings.dtype, temperature=settings.temperature)
    return check_tokens(rows, reference_tokens(baseline_rows), rule)


def _figures(
    set_name: str, label: str, rows: Sequence[Row], tokens: TokenCheck, baseline_rows: Sequence[Row]
) -> Figures:
    """baseline_rows: empty where its speed means nothing."""
    times = times_by_prompt(rows)
    shows_times = not tokens.is_refused
    return Figures(
        set_name=set_name,
        label=label,
        num_prompts=len(times),
        tokens=tokens,
        tokens_per_second=speed(times.values()) if shows_times else None,
        ratio=speed_ratio(times, times_by_prompt(baseline_rows)) if shows_times else None,
        ttft_ms=median(entry.ttft_ms for entry in times.values()) if shows_times else None,
        acceptance_length=acceptance_length(rows),
        hit_rate=hit_rate(rows),
        rounds=round_times(rows) if shows_times else None,
    )
