"""The command from top to bottom: settings, measurement, table and picture.

The table goes to stdout too, progress to stderr. Exit status: 0; 2 for a mistake in the arguments; 1 when an
engine was lost; 130 for Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.keys import keys_of
from pipeline.errors import ConfigError, EngineError
from tools.command_line import shown_command
from tools.figures.predictions import fan_out_figure, policies_figure, saguaro_c_figure
from tools.figures.result import FigureResult, load_matplotlib, write_figure
from tools.figures.settings import FigureName, FigureSettings, compose_settings
from tools.figures.theorem7 import theorem7_figure
from tools.figures.throughput import backup_figure, overhead_figure, throughput_figure
from tools.out_folder import make_out_folder
from tools.progress import say

_FIGURES: dict[FigureName, Callable[[FigureSettings], FigureResult]] = {
    FigureName.fan_out: fan_out_figure,
    FigureName.policies: policies_figure,
    FigureName.saguaro_c: saguaro_c_figure,
    FigureName.backup: backup_figure,
    FigureName.theorem7: theorem7_figure,
    FigureName.throughput: throughput_figure,
    FigureName.overhead: overhead_figure,
}


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if not arguments or any(argument in ("-h", "--help", "help") for argument in arguments):
        print(_usage())
        return 0 if arguments else 2
    try:
        settings = compose_settings(arguments)
        # Before anything is measured that could not be kept.
        load_matplotlib()
        make_out_folder(Path(settings.out))
        assert settings.figure is not None, "checked"
        result = _FIGURES[settings.figure](settings)
        command = shown_command("figures", arguments, path_keys=("out",))
        paths = write_figure(result, Path(settings.out), settings.figure.value, command)
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("stopped; nothing is kept of what was measured")
        return 130
    print(result.markdown(), end="")
    print("wrote " + ", ".join(str(path) for path in paths), file=sys.stderr)
    return 0


def _usage() -> str:
    lines = ["usage: python -m tools.figures figure=NAME out=FOLDER [key=value...]", ""]
    for key in keys_of(FigureSettings).values():
        lines += [f"{key.name}={key.default}  ({key.expects})", f"    {key.description}"]
    return "\n".join(lines)
