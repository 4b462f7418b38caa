"""The document as one HTML file that needs nothing else: style and pictures are in it."""

from __future__ import annotations

import base64
from pathlib import Path

import jinja2

from tools.bench.report import Report

_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def html(report: Report) -> str:
    """A whole page. Every text is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["data_uri"] = _data_uri
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(report=report) + "\n"


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
