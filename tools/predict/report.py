"""The study as a Markdown table. Only formats; `-` stands for what is undefined."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import FanOut
from tools.bench.figures import ALL_SETS
from tools.predict.cells import Cell
from tools.predict.curves import Curve
from tools.predict.figures import Rate, difference_of, figures_of, planned_counts, rate_of
from tools.predict.study import Plan

_UNDEFINED = "-"
_SHADOWS = [policy.value for policy in FanOut]
_FAN_OUTS = (1, 2, 4, 8, 16, 32)
_NOTES = """\
Hit rate: outcomes that were prepared, with at least one token drafted after them, of all outcomes; after ±
the standard error over prompts. Every branch was drafted to its end before the outcome was known. Ready
length: drafted tokens after the outcome, mean over the hits. Acceptance length: tokens a target forward,
the bonus token included. On the same rounds: what every policy planned in all rounds of the table above,
whichever policy they were drafted for; rounds too near the end of an answer to be planned are left out.
Miss rate at fan-out F: bonus tokens that were not among the F likeliest at their node, the proposed ones
not counted; A * F^-r is fitted to it on log axes."""


def markdown(plan: Plan, cells: Sequence[Cell], curves: Sequence[Curve]) -> str:
    """The whole report."""
    settings = plan.study.settings
    lines = [
        f"At most {settings.max_tokens} tokens an answer, seeds from {settings.seed}; "
        + ", ".join(f"{name}: {len(texts)} prompts" for name, texts in plan.prompts.items())
        + "."
        + "".join(f" {argument}" for argument in plan.study.engine_arguments),
        "",
    ]
    for system in plan.systems:
        for budget in plan.study.budgets:
            of_table = [c for c in cells if (c.key.system, c.key.budget) == (system, budget)]
            lines += [f"## {system}, B = {budget}", "", *_table(plan, of_table), ""]
            lines += ["On the same rounds:", "", *_same_rounds_table(plan, of_table), ""]
    lines += ["## Miss rate", "", *_curve_table(curves), "", *_same_answers(cells), "", _NOTES]
    return "\n".join(lines) + "\n"


def _table(plan: Plan, cells: Sequence[Cell]) -> list[str]:
    names = list(plan.prompts)
    policies = [policy.value for policy in plan.study.policies]
    header = ["temperature", "policy", *(f"hit rate, {name}" for name in names)]
    if len(names) > 1:
        header.append(f"hit rate, {ALL_SETS}")
    header += [f"over {policies[0]}", "ready length", "acceptance length"]
    lines = [_row(header), _row(["---"] * len(header))]
    for temperature in plan.study.temperatures:
        for policy in policies:
            mine, first = (
                [c for c in cells if (c.key.temperature, c.key.policy) == (temperature, which)]
                for which in (policy, policies[0])
            )
            by_set = [figures_of([cell for cell in mine if cell.key.set_name == name]) for name in names]
            together = figures_of(mine, compared_with=first if policy != policies[0] else ())
            rates = [figures.hit_rate for figures in by_set]
            if len(names) > 1:
                rates.append(together.hit_rate)
            lines.append(
                _row(
                    [
                        f"{temperature:g}",
                        policy,
                        *(_rate(rate) for rate in rates),
                        _rate(together.gain, sign="+"),
                        _number(together.ready_length),
                        _number(together.acceptance_length),
                    ]
                )
            )
    return lines


def _same_rounds_table(plan: Plan, cells: Sequence[Cell]) -> list[str]:
    """What each policy would have prepared in the rounds of all cells of a temperature."""
    names = list(plan.prompts)
    header = ["temperature", "policy", *names, *([ALL_SETS] if len(names) > 1 else []), f"over {_SHADOWS[0]}"]
    lines = [_row(header), _row(["---"] * len(header))]
    for temperature in plan.study.temperatures:
        mine = [cell for cell in cells if cell.key.temperature == temperature]
        groups = [[cell for cell in mine if cell.key.set_name == name] for name in names]
        if len(names) > 1:
            groups.append(mine)
        first = planned_counts(mine, _SHADOWS[0])
        for policy in _SHADOWS:
            rates = [rate_of(planned_counts(group, policy)) for group in groups]
            gain = difference_of(planned_counts(mine, policy), first) if policy != _SHADOWS[0] else None
            lines.append(
                _row([f"{temperature:g}", policy, *(_rate(rate) for rate in rates), _rate(gain, sign="+")])
            )
    return lines


def _curve_table(curves: Sequence[Curve]) -> list[str]:
    longest = max((len(curve.miss_rates) for curve in curves), default=0)
    fan_outs = [fan_out for fan_out in _FAN_OUTS if fan_out <= longest]
    header = ["system", "temperature", "outcomes", "A", "r", *(f"F = {fan_out}" for fan_out in fan_outs)]
    lines = [_row(header), _row(["---"] * len(header))]
    for curve in curves:
        rates = [float(curve.miss_rates[f - 1]) if f <= len(curve.miss_rates) else None for f in fan_outs]
        lines.append(
            _row(
                [
                    curve.system,
                    f"{curve.temperature:g}",
                    str(curve.num_outcomes),
                    _number(curve.law.scale),
                    _number(curve.law.power),
                    *(_number(rate, 3) for rate in rates),
                ]
            )
        )
    return lines


def _same_answers(cells: Sequence[Cell]) -> list[str]:
    """Under coupled verification every policy, system and budget returns the same tokens."""
    answers: dict[tuple[str, int, float], set[tuple[int, ...]]] = {}
    for cell in cells:
        for answer in cell.answers:
            key = (cell.key.set_name, answer.index, cell.key.temperature)
            answers.setdefault(key, set()).add(tuple(answer.token_ids))
    same = sum(len(different) == 1 for different in answers.values())
    return [f"Prompts and temperatures whose answer was the same in every cell: {same} of {len(answers)}."]


def _rate(rate: Rate | None, *, sign: str = "") -> str:
    if rate is None:
        return _UNDEFINED
    error = "" if rate.error is None else f" ± {rate.error:.3f}"
    return f"{rate.value:{sign}.3f}{error}"


def _number(value: float | None, digits: int = 2) -> str:
    return _UNDEFINED if value is None else f"{value:.{digits}f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
