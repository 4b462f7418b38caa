"""The command from top to bottom: settings, plan, cells, table, picture.

The table goes to stdout and OUT/table.md, the cells to OUT/results.json, the picture to OUT/miss_rates.png;
everything else to stderr. Exit status: 0; 2 for a mistake in the arguments or files; 1 if the engine broke;
130 for Ctrl-C, after which the same command goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from conf.keys import keys_of
from pipeline.errors import ConfigError, EngineError
from tools.predict.curves import curves_of
from tools.predict.plot import FILE_NAME as PICTURE
from tools.predict.plot import draw
from tools.predict.report import markdown
from tools.predict.settings import PredictSettings, Study, compose_study
from tools.predict.store import CellStore
from tools.predict.study import make_plan, run_plan
from tools.progress import say

_USAGE = """\
usage: python -m tools.predict out=FOLDER [key=value...]

Keys of the engine may be given as well, for all systems; python -m pipeline.run --help lists them.
"""


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    try:
        run(compose_study(arguments))
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return 130
    return 0


def run(study: Study) -> None:
    """Run what is missing, and report. Raises `ConfigError` and `EngineError`."""
    torch.set_num_threads(study.settings.threads)
    folder = Path(study.settings.out)
    plan = make_plan(study)
    cells = run_plan(plan, CellStore(folder, plan.identity()))
    curves = curves_of(cells)
    table = markdown(plan, cells, curves)
    scratch = folder / "table.md.partial"
    scratch.write_text(table, encoding="utf-8")
    os.replace(scratch, folder / "table.md")
    if not draw(curves, folder / PICTURE):
        say(f"no {PICTURE}: it needs matplotlib (pip install 'saguaro-engine[bench]')")
    print(table, end="")


def _usage() -> str:
    lines = [_USAGE]
    for key in keys_of(PredictSettings).values():
        lines += [f"{key.name}={key.default}  ({key.expects})", f"    {key.description}"]
    return "\n".join(lines)
