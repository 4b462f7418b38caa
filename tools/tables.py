"""A table before it is Markdown or HTML, and how numbers stand in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNDEFINED = "-"
"""Stands for what is not defined, or not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as they are shown. The first column holds names, the others are set flush right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown_lines(self) -> list[str]:
        """A line each for head, rule and rows."""
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        return [f"| {' | '.join(cells)} |" for cells in (self.head, rule, *self.rows)]


def number(value: float | None, digits: int) -> str:
    """A number with so many digits after the point; a dash for None."""
    return UNDEFINED if value is None else f"{value:.{digits}f}"
