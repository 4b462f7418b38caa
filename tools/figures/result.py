"""What a figure consists of: a table with remarks, and a picture; and how both are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureResult:
    """One figure."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    draw: Callable[[Any], None]
    """Draws into a matplotlib `Axes`."""
    remarks: Sequence[str] = field(default_factory=tuple)

    def markdown(self) -> str:
        """Title, table, remarks."""
        lines = [f"# {self.title}", "", _row(self.columns), _row(["---"] * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        for remark in self.remarks:
            lines += ["", remark]
        return "\n".join(lines) + "\n"


def write_figure(result: FigureResult, folder: Path, name: str, command: str) -> list[Path]:
    """Write `name.md` and `name.png`, and return their paths.

    Raises `ConfigError` without matplotlib, or if the folder cannot be written.
    """
    figure_class = load_matplotlib()
    figure = figure_class(figsize=(6.4, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(result.title, fontsize=10)
    result.draw(axes)
    table, picture = folder / f"{name}.md", folder / f"{name}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table.write_text(f"{result.markdown()}\n```\n{command}\n```\n", encoding="utf-8")
        figure.savefig(picture)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be written: {error}; choose another folder") from None
    return [table, picture]


def load_matplotlib() -> Any:
    """The class `Figure`, whose instances draw without a display. Raises `ConfigError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed: expected the extra tools; pip install '.[tools]'"
        ) from None
    return Figure


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
