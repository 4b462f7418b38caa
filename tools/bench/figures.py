"""The figures of every system in every case on every set: what the tables show and results.json keeps.

A system has figures once it has answered everything; one whose tokens are refused has no times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.schema import Verification
from tools.bench.cases import Case
from tools.bench.entries import PLAIN_RUN
from tools.bench.journal import Journal, PromptKey, Row
from tools.bench.measures import (
    Ratio,
    RoundTimes,
    TokenGaps,
    acceptance_length,
    decode_times,
    hit_rate,
    round_times,
    speed,
    speed_ratio,
    token_gaps,
    ttft_ms,
)
from tools.bench.plan import Plan, PlannedSystem
from tools.bench.protocol import EngineSpec, PeerSpec
from tools.bench.token_check import Rule, TokenCheck, check_tokens, reference_tokens, rule_between

ALL_SETS = "all sets"
"""What the sets together are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One system in one case on one set. Undefined figures are None."""

    case: Case
    set_name: str
    label: str
    num_prompts: int
    tokens: TokenCheck
    tokens_per_second: float | None
    """Of all requests of a batch together."""
    ratio: Ratio | None
    """Of the speed, to the baseline's."""
    ttft_ms: float | None
    """Time to first token, median over prompts."""
    token_gaps: TokenGaps | None
    acceptance_length: float | None
    hit_rate: float | None
    rounds: RoundTimes | None


def set_names(plan: Plan) -> list[str]:
    """Set by set, and all sets together if there are several."""
    names = list(dict.fromkeys(prompt.set_name for prompt in plan.prompts))
    return [*names, *([ALL_SETS] if len(names) > 1 else [])]


def all_figures(plan: Plan, journal: Journal) -> list[Figures]:
    """Case by case, set by set; systems in their order."""
    return [
        figures
        for case in plan.cases
        for set_name in set_names(plan)
        for figures in _figures_of_set(plan, journal, case, set_name)
    ]


def _figures_of_set(plan: Plan, journal: Journal, case: Case, set_name: str) -> list[Figures]:
    groups = {
        (group[0].set_name, group[0].index): len(group)
        for group in plan.groups(case.phase.batch_size)
        if set_name in (group[0].set_name, ALL_SETS)
    }
    rows = _complete_rows(plan, journal, case, groups)
    checks = {label: _check(plan, plan.system(label), case, rows) for label in rows}
    baseline_rows: Sequence[Row] = rows.get(plan.baseline.label, ())
    if baseline_rows and checks[plan.baseline.label].is_refused:
        baseline_rows = ()
    return [
        _figures(case, set_name, label, rows[label], tokens, baseline_rows, num_prompts=sum(groups.values()))
        for label, tokens in checks.items()
    ]


def _complete_rows(
    plan: Plan, journal: Journal, case: Case, groups: Mapping[PromptKey, int]
) -> dict[str, list[Row]]:
    """By label, of the systems that answered everything."""
    repeats = plan.settings.repeats
    rows: dict[str, list[Row]] = {system.label: [] for system in plan.systems}
    for row in journal.rows.values():
        is_meant = row.case == case and (row.set_name, row.index) in groups and row.repeat < repeats
        if is_meant and row.label in rows:
            rows[row.label].append(row)
    return {label: listed for label, listed in rows.items() if len(listed) == len(groups) * repeats}


def _check(plan: Plan, system: PlannedSystem, case: Case, rows: Mapping[str, Sequence[Row]]) -> TokenCheck:
    """rows: of every system that is through, by label."""
    baseline = plan.system(plan.baseline.label)
    rule = rule_between(
        system.entry,
        baseline.entry,
        dtype=plan.settings.dtype,
        temperature=case.temperature,
        is_coupled=_is_coupled(system) and _is_coupled(baseline),
    )
    reference = baseline.label
    if rule is Rule.must_match and not _has_same_law(system, baseline):
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
        against=None if reference == baseline.label else reference,
    )


def _is_coupled(system: PlannedSystem) -> bool:
    """Whether one of ours draws with shared noise; a peer is none of ours."""
    spec = system.spec
    return isinstance(spec, PeerSpec) or spec.config.speculation.verification is Verification.coupled


def _has_same_law(system: PlannedSystem, other: PlannedSystem) -> bool:
    """Whether two of our systems have the same target; of a peer only its number format is known."""
    mine, theirs = system.spec, other.spec
    if isinstance(mine, EngineSpec) and isinstance(theirs, EngineSpec):
        return mine.config.model.weights is theirs.config.model.weights
    return True


def _figures(
    case: Case,
    set_name: str,
    label: str,
    rows: Sequence[Row],
    tokens: TokenCheck,
    baseline_rows: Sequence[Row],
    *,
    num_prompts: int,
) -> Figures:
    """baseline_rows: empty where its speed means nothing."""
    times = decode_times(rows)
    shows_times = not tokens.is_refused
    return Figures(
        case=case,
        set_name=set_name,
        label=label,
        num_prompts=num_prompts,
        tokens=tokens,
        tokens_per_second=speed(times.values()) if shows_times else None,
        ratio=speed_ratio(times, decode_times(baseline_rows)) if shows_times else None,
        ttft_ms=ttft_ms(rows) if shows_times else None,
        token_gaps=token_gaps(rows) if shows_times else None,
        acceptance_length=acceptance_length(rows),
        hit_rate=hit_rate(rows),
        rounds=round_times(rows) if shows_times else None,
    )
