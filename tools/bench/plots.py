"""The figures as pictures: a panel for each case, all sets together unless a picture says otherwise.

A system whose tokens were refused has no times, and so no place in a picture.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.bench.cases import Case
from tools.bench.figures import Figures, set_names
from tools.bench.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 100
_PANEL_WIDTH = 5.2
_BAR_SHARE = 0.8
"""Of the room between two sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A finished picture."""

    file_name: str
    title: str
    caption: str
    png: bytes


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_all(plan: Plan, figures: Sequence[Figures]) -> list[Picture]:
    """The pictures that these figures give. Needs matplotlib."""
    shown = [entry for entry in figures if entry.tokens_per_second is not None]
    if not shown:
        return []
    name = set_names(plan)[-1]
    together = [entry for entry in shown if entry.set_name == name]
    colours = {system.label: f"C{number % 10}" for number, system in enumerate(plan.systems)}
    pictures = [
        Picture(
            file_name="speed.png",
            title="Speed",
            caption=f"Tokens/s on {name}; in brackets over {plan.baseline.label}, with its 95 % interval.",
            png=_panels(plan, together, lambda axes, entries: _draw_speed(axes, entries, colours)),
        ),
        Picture(
            file_name="token_times.png",
            title="Time between tokens",
            caption=f"Median (dot) to 95th percentile (bar's end) on {name}, over tokens.",
            png=_panels(plan, together, lambda axes, entries: _draw_gaps(axes, entries, colours)),
        ),
    ]
    if len(set_names(plan)) > 1:
        pictures.append(
            Picture(
                file_name="sets.png",
                title="Speed by prompt set",
                caption=f"Tokens/s over {plan.baseline.label}, with 95 % intervals.",
                png=_panels(plan, shown, lambda axes, entries: _draw_sets(axes, entries, colours)),
            )
        )
    if len(plan.settings.batch_size_list) > 1:
        pictures.append(
            Picture(
                file_name="batches.png",
                title="Speed by batch size",
                caption=f"Tokens/s of all requests together on {name}.",
                png=_draw_batches(plan, together, colours),
            )
        )
    return pictures


def _panels(plan: Plan, figures: Sequence[Figures], draw: Callable[[Axes, Sequence[Figures]], None]) -> bytes:
    """A row of panels for each temperature, a column for each phase."""
    phases, temperatures = plan.phases, plan.settings.temperature_list
    height = 1.3 + 0.34 * len(plan.systems)
    figure, grid = _grid(len(temperatures), len(phases), height)
    for row, temperature in zip(grid, temperatures, strict=True):
        for axes, phase in zip(row, phases, strict=True):
            case = Case(phase=phase, temperature=temperature)
            axes.set_title(str(case), fontsize=9)
            axes.grid(visible=True, alpha=0.25)
            axes.set_axisbelow(True)
            entries = [entry for entry in figures if entry.case == case]
            if entries:
                draw(axes, entries)
    return _png(figure)


def _draw_speed(axes: Axes, entries: Sequence[Figures], colours: dict[str, str]) -> None:
    labels = [entry.label for entry in entries]
    speeds = [entry.tokens_per_second or 0.0 for entry in entries]
    bars = axes.barh(labels, speeds, color=[colours[label] for label in labels])
    axes.bar_label(bars, labels=[_speed_text(entry) for entry in entries], padding=3, fontsize=8)
    axes.set_xlim(0, 1.75 * max(speeds))
    axes.set_xlabel("tokens/s")
    axes.invert_yaxis()


def _speed_text(entry: Figures) -> str:
    text = f"{entry.tokens_per_second:.1f}"
    if entry.ratio is None:
        return text
    interval = entry.ratio.interval
    spread = "" if interval is None else f", {interval[0]:.2f} to {interval[1]:.2f}"
    return f"{text} ({entry.ratio.value:.2f}{spread})"


def _draw_gaps(axes: Axes, entries: Sequence[Figures], colours: dict[str, str]) -> None:
    for entry in entries:
        gaps, colour = entry.token_gaps, colours[entry.label]
        if gaps is not None:
            axes.plot([gaps.median_ms, gaps.p95_ms], [entry.label] * 2, color=colour, linewidth=5, alpha=0.5)
            axes.plot([gaps.median_ms], [entry.label], "o", color=colour)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms between tokens")
    axes.invert_yaxis()


def _draw_sets(axes: Axes, entries: Sequence[Figures], colours: dict[str, str]) -> None:
    names = list(dict.fromkeys(entry.set_name for entry in entries))
    labels = list(dict.fromkeys(entry.label for entry in entries))
    width = _BAR_SHARE / len(labels)
    for entry in entries:
        if entry.ratio is None:
            continue
        offset = (labels.index(entry.label) - (len(labels) - 1) / 2) * width
        value, interval = entry.ratio.value, entry.ratio.interval
        errors = None if interval is None else [[value - interval[0]], [interval[1] - value]]
        axes.bar(
            names.index(entry.set_name) + offset,
            value,
            width,
            yerr=errors,
            error_kw={"linewidth": 0.8},
            color=colours[entry.label],
            label=entry.label if entry.set_name == names[-1] else None,
        )
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, fontsize=8)


def _draw_batches(plan: Plan, figures: Sequence[Figures], colours: dict[str, str]) -> bytes:
    setups, temperatures = plan.settings.setup_list, plan.settings.temperature_list
    figure, grid = _grid(len(temperatures), len(setups), 3.6)
    for row, temperature in zip(grid, temperatures, strict=True):
        for axes, setup in zip(row, setups, strict=True):
            for system in plan.systems:
                points = sorted(
                    (entry.case.phase.batch_size, entry.tokens_per_second or 0.0)
                    for entry in figures
                    if entry.label == system.label
                    and (entry.case.temperature, entry.case.phase.setup) == (temperature, setup)
                )
                if points:
                    axes.plot(
                        *zip(*points, strict=True), "o-", color=colours[system.label], label=system.label
                    )
            axes.set_title(f"{setup.value}, temperature {temperature:g}", fontsize=9)
            axes.set_xlabel("requests at once")
            axes.set_ylabel("tokens/s")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.25)
    return _png(figure)


def _grid(num_rows: int, num_columns: int, height: float) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure  # optional: the extra `tools`

    figure = Figure(figsize=(_PANEL_WIDTH * num_columns, height * num_rows), dpi=_DPI, layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False).tolist()


def _png(figure: Figure) -> bytes:
    """With one legend for all panels, if anything in them has a label."""
    handles = {}
    for axes in figure.axes:
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
