"""The command from top to bottom: settings, plan, answers, figures, report.

The table goes to stdout, everything else to stderr. Exit status: 0 even if a peer was skipped or a system
failed, which the table says; 1 if no system has figures, or the disk is full and the like; 2 for a mistake in
the arguments or files; 128 + the signal's number for Ctrl-C (130) and SIGTERM, after which the
same command goes on.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.compose import options_of
from conf.keys import keys_of
from pipeline.errors import ConfigError, EngineError
from pipeline.interrupts import Interrupts
from tools.bench.entries import PEERS
from tools.bench.figures import all_figures
from tools.bench.files import results, write_files
from tools.bench.journal import Journal
from tools.bench.plan import make_plan
from tools.bench.plots import can_draw, draw_all
from tools.bench.protocol import WorkerSpec
from tools.bench.report import make_report, markdown
from tools.bench.runner import Runner, Worker
from tools.bench.settings import BenchSettings, compose_settings
from tools.bench.worker_process import WorkerProcess
from tools.command_line import shown_command
from tools.progress import say

_PATH_KEYS = ("out", "prompts", "model", "draft")


def main(arguments: Sequence[str], *, open_worker: Callable[[WorkerSpec], Worker] = WorkerProcess) -> int:
    """The command."""
    if not arguments or any(argument in ("-h", "--help", "help") for argument in arguments):
        print(_usage())
        return 0 if arguments else 2
    interrupts = Interrupts()
    try:
        with interrupts:
            settings = compose_settings(arguments)
            command = shown_command("bench", arguments, path_keys=_PATH_KEYS)
            return run(settings, command=command, open_worker=open_worker)
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: the system refused what the bench needs: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return interrupts.exit_status


def run(
    settings: BenchSettings,
    *,
    command: str = "",
    open_worker: Callable[[WorkerSpec], Worker] = WorkerProcess,
) -> int:
    """Measure and report. command: as the report shows it. Returns the exit status. Raises `ConfigError`."""
    folder = Path(settings.out)
    plan = make_plan(settings)
    identity = plan.identity()
    may_differ = ("source",) if settings.mix_sources else ()
    if not can_draw():
        say("matplotlib is not installed, so there will be no pictures; pip install matplotlib")
    with Journal(folder, identity, may_differ=may_differ) as journal:
        load_before = os.getloadavg()
        outcomes = Runner(plan, journal, source=identity["source"], open_worker=open_worker).run()
        about = {
            "date": datetime.date.today().isoformat(),
            "command": command,
            "machine": identity["machine"],
            "versions": identity["versions"],
            "load_average": [f"{load:.2f}" for load in (load_before[0], os.getloadavg()[0])],
        }
        figures = all_figures(plan, journal)
        pictures = draw_all(plan, figures) if can_draw() else []
        report = make_report(plan, figures, outcomes, journal, about=about, pictures=pictures)
        write_files(folder, report, results(plan, figures, outcomes, journal, about=about), pictures)
    print(markdown(report), end="")
    say(f"written: {folder / 'report.html'}")
    return 0 if figures else 1


def _usage() -> str:
    lines = [
        "usage: python -m tools.bench out=FOLDER [key=value...]",
        "",
        f"our systems: {', '.join(options_of('conf'))}; peers: {', '.join(PEERS)}",
        "",
    ]
    for key in keys_of(BenchSettings).values():
        lines += [f"{key.name}={key.default}  ({key.expects})", f"    {key.description}"]
    return "\n".join(lines)
