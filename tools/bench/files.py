"""The files that a bench leaves behind, each complete or as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from tools.bench.figures import Figures
from tools.bench.html import html
from tools.bench.journal import Journal
from tools.bench.plan import Plan
from tools.bench.plots import Picture
from tools.bench.report import Report, markdown
from tools.bench.runner import Outcomes


def results(
    plan: Plan,
    figures: Sequence[Figures],
    outcomes: Outcomes,
    journal: Journal,
    *,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything, answers included, as JSON can hold it."""
    return {
        "settings": msgspec.to_builtins(plan.settings),
        "baseline": plan.baseline.label,
        "sources": sorted(journal.sources),
        **about,
        "systems": {
            system.label: {
                "name": system.entry.name,
                "overrides": list(system.entry.overrides),
                "phases": [
                    {
                        **msgspec.to_builtins(phase),
                        "state": outcomes[phase, system.label].state.value,
                        "reason": outcomes[phase, system.label].reason,
                        "given": journal.given.get((system.label, phase)),
                        "worker": msgspec.to_builtins(system.spec_for(phase)),
                    }
                    for phase in plan.phases
                ],
            }
            for system in plan.systems
        },
        "figures": [
            {**asdict(entry), "tokens": {**asdict(entry.tokens), "text": str(entry.tokens)}}
            for entry in figures
        ],
        "prompts": [
            {"set_name": p.set_name, "index": p.index, **msgspec.to_builtins(p.question)}
            for p in plan.prompts
        ],
        "answers": [msgspec.to_builtins(row) for row in journal.rows.values()],
    }


def write_files(
    folder: Path, report: Report, content: Mapping[str, Any], pictures: Sequence[Picture]
) -> None:
    """table.md, report.html, results.json, and the pictures."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    bodies = {
        **{picture.file_name: picture.png for picture in pictures},
        "results.json": text.encode(),
        "report.html": html(report).encode(),
        "table.md": markdown(report).encode(),
    }
    for name, body in bodies.items():
        scratch = folder / f"{name}.partial"
        scratch.write_bytes(body)
        os.replace(scratch, folder / name)
