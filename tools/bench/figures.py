"""The figures of every system on every set: what the table shows and results.json keeps.

A system has figures once it has answered everything; one whose tokens are refused has no times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tools.bench.entries import PLAIN_RUN
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
from tools.bench.protocol import EngineSpec
from tools.bench.token_check import Rule, TokenCheck, check_tokens, reference_tokens, rule_between

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
            system.label: _check(plan, system, complete)
            for system in plan.systems
            if system.label in complete
        }
        has_ratios = baseline_rows and not checks[plan.baseline.label].is_refused
        found += [
            _figures(name, label, complete[label], tokens, baseline_rows if has_ratios else [])
            for label, tokens in checks.items()
        ]
    return found


def _check(plan: Plan, system: PlannedSystem, rows: Mapping[str, Sequence[Row]]) -> TokenCheck:
    """rows: of every system that is through, by label."""
    settings = plan.settings
    rule = rule_between(system.entry, plan.baseline, dtype=settings.dtype, temperature=settings.temperature)
    reference = plan.baseline.label
    if rule is Rule.must_match and not _has_same_law(system, plan.system(reference)):
        same_law = [
            other.label
            for other in plan.systems
            if other.entry.name == PLAIN_RUN and _has_same_law(system, other)
        ]
        reference = same_law[0] if same_law else ""
    return check_tokens(
        rows[system.label],
        reference_tokens(rows.get(reference, ())),
        rule,
        against=None if reference == plan.baseline.label else reference,
    )


def _has_same_law(system: PlannedSystem, other: PlannedSystem) -> bool:
    """Whether two of our systems have the same target; of a peer only its number format is known."""
    mine, theirs = system.spec, other.spec
    if isinstance(mine, EngineSpec) and isinstance(theirs, EngineSpec):
        return mine.config.model.weights is theirs.config.model.weights
    return True


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
