"""Figures about batches and rounds: throughput against latency, backups by batch size, overhead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tools.figures.engine_run import Measured, check_tokens, measure
from tools.figures.points import config_of, ssd_arguments
from tools.figures.result import FigureResult
from tools.figures.settings import FigureSettings
from tools.progress import say

_PUBLISHED = {
    # tokens/s at batch 1, greedy: (plain, linear, SSD)
    "emulated_llama3_70b": {"paper": (54.7, 161.8, 255.8), "reproduction": (67.0, 182.0, 280.0)},
    "emulated_qwen3_32b": {"paper": (88.8, 136.8, 203.8), "reproduction": (97.0, 141.0, 211.0)},
}
"""arXiv 2603.03251, mean of four sets; and the reproductions that the tables of times come from."""
_LINEAR_DEPTH = {"emulated_llama3_70b": 6, "emulated_qwen3_32b": 5}
_SSD_DEPTH = {"emulated_qwen3_32b": 4}
"""K of the reproductions, where it is not depth=."""


def _run(settings: FigureSettings, batch: int, *arguments: str) -> Measured:
    # The same requests at every batch size, as far as it divides the largest.
    num_groups = max(settings.num_prompts * max(settings.batches) // batch, 1)
    return measure(
        config_of(settings, f"max_requests={batch}", *arguments),
        num_groups=num_groups,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        first_seed=settings.seed,
    )


def _systems(settings: FigureSettings) -> dict[str, list[str]]:
    """`ssd` as published; the other runs that prepare outcomes as they are by default, planned online."""
    linear_depth = _LINEAR_DEPTH.get(settings.model, settings.depth)
    depth = _SSD_DEPTH.get(settings.model, settings.depth)
    budget = settings.fan_out * (depth + 1)
    return {
        "autoregressive": ["conf=autoregressive"],
        "speculative": [
            "conf=speculative",
            f"speculation.depth={linear_depth}",
            "speculation.min_path_prob=0",
        ],
        "ssd": ssd_arguments(depth, budget),
        "saguaro": ["conf=saguaro", f"speculation.depth={depth}"],
        "saguaro_tree": ["conf=saguaro_tree", f"speculation.depth={depth}"],
    }


def throughput_figure(settings: FigureSettings) -> FigureResult:
    """Tokens/s of all requests together against tokens/s of one, for every batch size."""
    runs: dict[str, list[Measured]] = {}
    rows = []
    for label, arguments in _systems(settings).items():
        for batch in settings.batches:
            measured = _run(settings, batch, *arguments)
            runs.setdefault(label, []).append(measured)
            check_tokens(label, measured, runs["autoregressive"][len(runs[label]) - 1])
            rows.append(
                [
                    label,
                    str(batch),
                    f"{measured.tokens_per_second:.1f}",
                    f"{measured.tokens_per_second / batch:.1f}",
                    f"{measured.tokens_per_round:.2f}",
                    f"{measured.hit_rate:.3f}" if measured.hit_rate else "-",
                    f"{measured.round_ms:.1f}",
                    f"{measured.per_round('target_compute_ms'):.1f}",
                    f"{measured.per_round('target_wait_ms'):.1f}",
                ]
            )
            say(f"{label}, batch {batch}: {measured.tokens_per_second:.1f} tokens/s")

    def draw(axes: Any) -> None:
        for label, listed in runs.items():
            each = [run.tokens_per_second / run.batch for run in listed]
            axes.plot(each, [run.tokens_per_second for run in listed], "o-", label=label)
        axes.set(xlabel="tokens/s of one request", ylabel="tokens/s of all requests")
        axes.legend()

    return FigureResult(
        title=f"Throughput against latency: {settings.model}, time scale {settings.time_scale:g}",
        columns=[
            "system",
            "batch",
            "tokens/s",
            "of one request",
            "tokens a round",
            "hit rate",
            "round, ms",
            "of it target, ms",
            "target waits, ms",
        ],
        rows=rows,
        draw=draw,
        remarks=[
            "All systems returned the same tokens.",
            *(_beside_published(settings, runs) if settings.batches[0] == 1 else ()),
        ],
    )


def _beside_published(settings: FigureSettings, runs: dict[str, list[Measured]]) -> list[str]:
    def here(prepared: str) -> tuple[float, ...]:
        labels = ("autoregressive", "speculative", prepared)
        return tuple(runs[label][0].tokens_per_second * settings.time_scale for label in labels)

    lines = [
        "| batch 1, times the time scale | plain | linear | SSD | linear / plain | SSD / linear |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    measured = {f"here, SSD = {label}": here(label) for label in ("ssd", "saguaro", "saguaro_tree")}
    for name, figures in {**measured, **_PUBLISHED.get(settings.model, {})}.items():
        ratios = (figures[1] / figures[0], figures[2] / figures[1])
        lines.append(
            "| "
            + " | ".join([name, *(f"{f:.1f}" for f in figures), *(f"{ratio:.2f}" for ratio in ratios)])
            + " |"
        )
    return ["\n".join(lines)]


def backup_figure(settings: FigureSettings) -> FigureResult:
    """Drafting again after a miss, while all wait, against look-up, which makes nobody wait."""
    labels = {"sequential": "draft again", "ngram": "look up"}
    speeds: dict[str, list[float]] = {label: [] for label in labels}
    rows = []
    # The largest batch answers all the prompts of the others in the shortest time.
    plain = _run(settings, max(settings.batches), "conf=autoregressive")
    for batch in settings.batches:
        for backup in labels:
            budget = settings.fan_out * (settings.depth + 1)
            arguments = ssd_arguments(settings.depth, budget)
            arguments.remove("speculation.backup=sequential")
            measured = _run(settings, batch, *arguments, f"speculation.backup={backup}")
            check_tokens(labels[backup], measured, plain)
            speeds[backup].append(measured.tokens_per_second)
            rows.append(
                [
                    str(batch),
                    labels[backup],
                    f"{measured.tokens_per_second:.1f}",
                    f"{measured.tokens_per_round:.2f}",
                    f"{measured.hit_rate:.3f}",
                    f"{measured.round_ms:.1f}",
                ]
            )
            say(f"batch {batch}, {labels[backup]}: {measured.tokens_per_second:.1f} tokens/s")

    def draw(axes: Any) -> None:
        for backup, label in labels.items():
            axes.plot(settings.batches, speeds[backup], "o-", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(settings.batches, [str(batch) for batch in settings.batches])
        axes.set(xlabel="batch size", ylabel="tokens/s of all requests")
        axes.legend()

    crossing = critical_batch(settings.batches, speeds["sequential"], speeds["ngram"])
    found = "Look-up is not the faster one at the largest batch."
    if crossing is not None:
        found = f"Look-up is the faster one from batch {crossing} on."
    return FigureResult(
        title=f"After a miss: {settings.model}, K = {settings.depth}, time scale {settings.time_scale:g}",
        columns=["batch", "backup", "tokens/s", "tokens a round", "hit rate", "round, ms"],
        rows=rows,
        draw=draw,
        remarks=[
            found,
            "All answers equal plain decoding's.",
            "Text of an emulated model does not repeat itself: the look-up finds nothing, and the target "
            "verifies the last token alone.",
        ],
    )


def critical_batch(
    batches: Sequence[int], draft_again: Sequence[float], look_up: Sequence[float]
) -> int | None:
    """b*: the least batch size from which on look-up is faster; None if it is not at the largest. Speeds."""
    found = None
    for batch, again, looked in sorted(zip(batches, draft_again, look_up, strict=True), reverse=True):
        if looked <= again:
            break
        found = batch
    return found


def overhead_figure(settings: FigureSettings) -> FigureResult:
    """A round's time that is neither target forward nor draft step, with a slow and a fast target."""
    labels, bars, rows = [], [], []
    for target_ms, draft_ms in ((15.0, 2.0), (2.0, 0.3)):
        times = [
            "model.emulated.target_rows=[1]",
            f"model.emulated.target_ms=[{target_ms}]",
            "model.emulated.draft_rows=[1]",
            f"model.emulated.draft_ms=[{draft_ms}]",
        ]
        plain: Measured | None = None
        for label, arguments in _systems(replace(settings, model="emulated")).items():
            measured = _run(replace(settings, batches=[1]), 1, *times, *arguments)
            plain = plain or measured  # comes first
            check_tokens(label, measured, plain)
            table_ms = target_ms * settings.time_scale
            choosing = measured.per_round("target_compute_ms") - table_ms
            waited = measured.per_round("target_wait_ms")
            drafting = measured.per_round("draft_wait_ms")
            rest = measured.round_ms - measured.per_round("target_compute_ms") - waited
            parts = [table_ms, choosing, drafting, waited - drafting, rest]
            labels.append(f"{label}, {target_ms:g} ms")
            bars.append(parts)
            rows.append(
                [f"{target_ms:g}", label, f"{measured.round_ms:.2f}", *(f"{part:.2f}" for part in parts)]
            )
            say(f"{label}, T_v {target_ms:g} ms: round {measured.round_ms:.2f} ms")
    names = [
        "forward",
        "choosing and late waking",
        "waits for draft steps",
        "waits for mail and planning",
        "committing",
    ]

    def draw(axes: Any) -> None:
        starts = [0.0] * len(bars)
        for index, name in enumerate(names):
            lengths = [parts[index] for parts in bars]
            axes.barh(range(len(bars)), lengths, left=starts, label=name)
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        axes.set_yticks(range(len(bars)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="ms a round")
        axes.legend(fontsize=8)

    return FigureResult(
        title="Where a round's time goes at T_v = 15 and 2 ms",
        columns=["T_v, ms", "system", "round, ms", *(f"{name}, ms" for name in names)],
        rows=rows,
        draw=draw,
    )
