"""Figures about predictions: hit rate against fan-out, policies at equal budget, and Saguaro sampling's C."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from conf.schema import FanOut
from pipeline.messages import ProposalSource
from tools.figures.points import predict, ssd_arguments
from tools.figures.result import FigureResult
from tools.figures.settings import FigureSettings
from tools.progress import say

_TICKS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Of a logarithmic axis of rates."""


def fit_power_law(fan_outs: Sequence[int], miss_rates: Sequence[float]) -> tuple[float, float] | None:
    """A and r of `miss rate = A * F^-r`: least squares on log axes. None without two points."""
    points = [
        (math.log(fan_out), math.log(miss))
        for fan_out, miss in zip(fan_outs, miss_rates, strict=True)
        if miss > 0
    ]
    mean_x = sum(x for x, _ in points) / len(points) if points else 0.0
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return None
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return math.exp(mean_y - slope * mean_x), -slope


def fan_out_figure(settings: FigureSettings) -> FigureResult:
    """Equally many bonus tokens prepared after every number of accepted ones; all branches finish."""
    fan_outs, misses, rows = sorted(set(settings.fan_outs)), [], []
    for fan_out in fan_outs:
        rounds = predict(settings, *ssd_arguments(settings.depth, fan_out * (settings.depth + 1)))
        misses.append(1 - rounds.hit_rate)
        num_rounds = sum(len(listed) for listed in rounds.by_source.values())
        rows.append([str(fan_out), f"{rounds.hit_rate:.3f}", f"{misses[-1]:.3f}", str(num_rounds)])
        say(f"fan-out {fan_out}: hit rate {rounds.hit_rate:.3f} in {num_rounds} rounds")
    law = fit_power_law(fan_outs, misses)
    remark = "No power law can be fitted: fewer than two points have misses."
    if law is not None:
        remark = f"Fitted power law: miss rate = {law[0]:.3f} * F^-{law[1]:.2f}."
        for row, fan_out in zip(rows, fan_outs, strict=True):
            row.append(f"{law[0] * fan_out ** -law[1]:.3f}")
    else:
        rows = [[*row, "-"] for row in rows]

    def draw(axes: Any) -> None:
        axes.loglog(fan_outs, [miss or math.nan for miss in misses], "o", label="measured")
        if law is not None:
            fitted = [law[0] * fan_out ** -law[1] for fan_out in fan_outs]
            axes.loglog(fan_outs, fitted, "-", label=f"{law[0]:.2f} F^-{law[1]:.2f}")
        axes.set_xticks(fan_outs, [str(fan_out) for fan_out in fan_outs])
        seen = [miss for miss in misses if miss > 0] or [1.0]
        ticks = [tick for tick in _TICKS if 0.8 * min(seen) <= tick <= 1.25 * max(seen)]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="fan-out F after each number of accepted tokens", ylabel="miss rate")
        axes.legend()

    return FigureResult(
        title=f"Miss rate against fan-out: {settings.model}, K = {settings.depth}, "
        f"temperature {settings.temperature:g}",
        columns=["F", "hit rate", "miss rate", "rounds", "fitted miss rate"],
        rows=rows,
        draw=draw,
        remarks=[remark],
    )


def policies_figure(settings: FigureSettings) -> FigureResult:
    """Hit rate of every fan-out policy at equal budget; all branches finish."""
    budgets = [fan_out * (settings.depth + 1) for fan_out in sorted(set(settings.fan_outs))]
    rates: dict[FanOut, list[float]] = {policy: [] for policy in FanOut}
    rows = []
    for budget in budgets:
        for policy in FanOut:
            arguments = ssd_arguments(settings.depth, budget, f"speculation.fan_out={policy.name}")
            rates[policy].append(predict(settings, *arguments).hit_rate)
        rows.append([str(budget), *(f"{rates[policy][-1]:.3f}" for policy in FanOut)])
        say(f"budget {budget}: " + ", ".join(f"{policy.name} {rates[policy][-1]:.3f}" for policy in FanOut))

    def draw(axes: Any) -> None:
        for policy in FanOut:
            axes.plot(budgets, rates[policy], "o-", label=policy.name)
        axes.set(xlabel="budget B: outcomes prepared a round", ylabel="hit rate")
        axes.legend()

    return FigureResult(
        title=f"Hit rate at equal budget: {settings.model}, K = {settings.depth}, "
        f"temperature {settings.temperature:g}",
        columns=["B", *(policy.name for policy in FanOut)],
        rows=rows,
        draw=draw,
    )


def saguaro_c_figure(settings: FigureSettings) -> FigureResult:
    """What a smaller C gains in hits and loses in acceptance, by the rejection rule; all branches finish."""
    values, fan_outs = sorted(set(settings.saguaro_cs), reverse=True), sorted(set(settings.fan_outs))
    points: dict[int, list[tuple[float, float]]] = {fan_out: [] for fan_out in fan_outs}
    rows = []
    for fan_out in fan_outs:
        for c in values:
            rounds = predict(
                settings,
                *ssd_arguments(
                    settings.depth,
                    fan_out * (settings.depth + 1),
                    "speculation.verification=rejection",
                    f"speculation.saguaro_c={c}",
                ),
            )
            points[fan_out].append((rounds.hit_rate, rounds.mean()))
            after = [rounds.mean(source) for source in (ProposalSource.HIT, ProposalSource.BACKUP)]
            rows.append(
                [
                    str(fan_out),
                    f"{c:g}",
                    f"{rounds.hit_rate:.3f}",
                    *(f"{tokens:.2f}" for tokens in (*after, rounds.mean())),
                    str(sum(len(listed) for listed in rounds.by_source.values())),
                ]
            )
            say(
                f"F = {fan_out}, C = {c:g}: hit rate {rounds.hit_rate:.3f}, "
                f"{rounds.mean():.2f} tokens a round"
            )

    def draw(axes: Any) -> None:
        for fan_out, listed in points.items():
            axes.plot(
                [hit for hit, _ in listed], [tokens for _, tokens in listed], "o-", label=f"F = {fan_out}"
            )
            for c, point in zip(values, listed, strict=True):
                axes.annotate(f"{c:g}", point, xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set(xlabel="hit rate (beside each point: C)", ylabel="tokens a round")
        axes.legend()

    return FigureResult(
        title=f"Saguaro sampling's C: {settings.model}, K = {settings.depth}, "
        f"temperature {settings.temperature:g}",
        columns=["F", "C", "hit rate", "tokens after a hit", "after a miss", "tokens a round", "rounds"],
        rows=rows,
        draw=draw,
        remarks=["C = 1 draws from the draft's own law. A miss is drafted again from scratch."],
    )
