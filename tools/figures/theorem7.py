"""Measured speed-up of SSD against Theorem 7 (arXiv 2603.03251), over depths, budgets and acceptances.

The theorem, in measured times: a round takes `T_v + wait` after a hit and `T_v + wait + T_b` after a miss, so

    tokens/s = [p * E_hit + (1 - p) * E_miss] / [T_v + wait + (1 - p) * T_b + overhead]

Preparing is interruptible here: when the outcome comes, the step under way is finished, and what is ready
is served. So `max(T_v, T_p)` reads `T_v + wait`: the end of the first draft step that outlasts the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conf.schema import RunConfig
from pipeline.messages import ProposalSource
from stages.model.emulated_times import TimeTable
from tools.figures.engine_run import Measured, check_tokens, measure
from tools.figures.points import config_of, ssd_arguments
from tools.figures.result import FigureResult
from tools.figures.settings import FigureSettings
from tools.progress import say


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTimes:
    """What draft steps take, in ms."""

    single: float
    """A step over one token: of the glue, and of drafting after a miss."""
    branch: float
    """A step over all branches."""

    def hit_wait(self, verify_ms: float, depth: int) -> float:
        """How long the target waits after a verification that took `verify_ms`, on a hit."""
        for level in range(1, depth + 1):
            end = self.single + level * self.branch
            if end >= verify_ms:
                return end - verify_ms
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Theorem:
    """What Theorem 7 is fed with. Times in ms."""

    hit_rate: float
    tokens_after_hit: float
    tokens_after_miss: float
    verify: float
    hit_wait: float
    backup: float
    overhead: float

    def tokens_per_second(self) -> float:
        """Of one request."""
        tokens = self.hit_rate * self.tokens_after_hit + (1 - self.hit_rate) * self.tokens_after_miss
        round_ms = self.verify + self.hit_wait + (1 - self.hit_rate) * self.backup + self.overhead
        return 1000 * tokens / round_ms


def draft_times(config: RunConfig, linear: Measured) -> DraftTimes:
    """Step times by the table, and what a step takes beyond it: as measured in linear speculation.

    linear: a run in which the target waits for `depth` steps over one token in every round.
    """
    emulated = config.model.emulated
    table = TimeTable(emulated.draft_rows, emulated.draft_ms, scale=emulated.time_scale)
    single = linear.per_round("target_wait_ms") / config.speculation.depth
    excess = single - table.ms(1)
    return DraftTimes(single=single, branch=table.ms(config.speculation.budget) + excess)


def theorem_of(config: RunConfig, run: Measured, times: DraftTimes) -> Theorem:
    """Theorem 7 with the hit rate, the verification time and the overhead of the run itself."""
    verify = run.per_round("target_compute_ms")
    return Theorem(
        hit_rate=run.hit_rate,
        tokens_after_hit=run.tokens_after(ProposalSource.HIT),
        tokens_after_miss=run.tokens_after(ProposalSource.BACKUP),
        verify=verify,
        hit_wait=times.hit_wait(verify, config.speculation.depth),
        backup=times.single * config.speculation.depth,
        overhead=run.round_ms - verify - run.per_round("target_wait_ms"),
    )


def theorem7_figure(settings: FigureSettings) -> FigureResult:
    """Sweep, measure, compare."""

    def run(config: RunConfig) -> Measured:
        return measure(
            config,
            num_groups=settings.num_prompts,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            first_seed=settings.seed,
        )

    points, rows, plain_speeds = [], [], []
    fan_outs = sorted(set(settings.fan_outs))[:3:2]
    for acceptance in settings.acceptances:
        law = f"model.emulated.hard_acceptance={acceptance}"
        # Of the same law, which above temperature 0 decides what is drawn.
        plain_run = run(config_of(settings, law, "conf=autoregressive"))
        plain = plain_run.tokens_per_second
        plain_speeds.append(f"{plain:.1f}")
        for depth in settings.depths:
            linear_arguments = [
                "conf=speculative",
                f"speculation.depth={depth}",
                "speculation.min_path_prob=0",
            ]
            linear = run(config_of(settings, law, *linear_arguments))
            check_tokens(f"linear speculation, K = {depth}", linear, plain_run)
            for fan_out in fan_outs:
                config = config_of(settings, law, *ssd_arguments(depth, fan_out * (depth + 1)))
                measured = run(config)
                check_tokens(f"SSD, K = {depth}, F = {fan_out}", measured, plain_run)
                theorem = theorem_of(config, measured, draft_times(config, linear))
                predicted, got = theorem.tokens_per_second() / plain, measured.tokens_per_second / plain
                difference = got / predicted - 1 if predicted > 0 else None
                if difference is not None:
                    points.append((predicted, got))
                rows.append(
                    [
                        f"{acceptance:g}",
                        str(depth),
                        str(fan_out * (depth + 1)),
                        f"{theorem.hit_rate:.3f}",
                        f"{theorem.tokens_after_hit:.2f}",
                        f"{theorem.tokens_after_miss:.2f}",
                        f"{theorem.verify:.1f}",
                        f"{theorem.hit_wait:.1f}",
                        f"{theorem.backup:.1f}",
                        f"{theorem.overhead:.2f}",
                        f"{predicted:.2f}",
                        f"{got:.2f}",
                        "-" if difference is None else f"{100 * difference:+.1f} %",
                    ]
                )
                say(
                    f"acceptance {acceptance:g}, K {depth}, F {fan_out}: {predicted:.2f} predicted, {got:.2f}"
                )
    worst = max((abs(got / predicted - 1) for predicted, got in points), default=None)
    found = "No answer was long enough for a whole round; raise max_tokens."
    if worst is not None:
        found = f"Largest difference: {100 * worst:.1f} %."

    def draw(axes: Any) -> None:
        most = 1.05 * max((max(point) for point in points), default=1.0)
        axes.plot([0, most], [0, most], "-", color="gray", label="equal")
        axes.fill_between([0, most], [0, 0.95 * most], [0, 1.05 * most], color="gray", alpha=0.2, label="5 %")
        axes.plot([predicted for predicted, _ in points], [got for _, got in points], "o")
        axes.set(xlabel="speed-up by Theorem 7", ylabel="measured speed-up", xlim=(0, most), ylim=(0, most))
        axes.legend()

    return FigureResult(
        title=f"SSD over plain decoding: {settings.model}, time scale {settings.time_scale:g}",
        columns=[
            "hard acceptance",
            "K",
            "B",
            "hit rate",
            "E hit",
            "E miss",
            "T_v, ms",
            "wait, ms",
            "T_b, ms",
            "overhead, ms",
            "Theorem 7",
            "measured",
            "difference",
        ],
        rows=rows,
        draw=draw,
        remarks=[
            f"Plain decoding: {', '.join(plain_speeds)} tokens/s, by acceptance; all answers equal its own. "
            + found
        ],
    )
