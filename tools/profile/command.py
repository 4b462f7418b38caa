"""The command from top to bottom: run or attach, then write trace, tables and picture.

Without `attach` everything but the keys of `tools.profile.settings` goes to `pipeline.run` as it stands, so a
profiled run is an ordinary one: same arguments, answers on stdout, same exit status. The table goes to stderr
too; the files say the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from conf.check import check
from conf.compose import compose
from conf.keys import keys_of
from conf.schema import RunConfig
from pipeline.arguments import OWN_KEYS
from pipeline.engine import Engine
from pipeline.errors import ConfigError, EngineError, shown
from pipeline.model_source import resolve_models
from pipeline.profiling import EngineProfile
from pipeline.run import main as run_main
from tools.bench.plots import can_draw
from tools.out_folder import make_out_folder
from tools.profile.attach import profile_running
from tools.profile.cost import measure_cost
from tools.profile.gantt import choose_rounds, draw_rounds
from tools.profile.profiled_engine import ProfiledEngine
from tools.profile.rounds import find_rounds
from tools.profile.settings import ProfileSettings, split_settings
from tools.profile.summary import markdown, summarise
from tools.profile.timeline import make_timeline
from tools.profile.trace import write_trace
from tools.run_in_words import model_in_words, speculation_in_words

_BAD_INPUT, _ENGINE_DEAD, _CTRL_C = 2, 1, 130


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(_usage())
        return 0
    try:
        settings, run_arguments = split_settings(arguments)
        if settings.attach is not None:
            _check_files(settings)
            write_files(settings, profile_running(settings))
            return 0
        if settings.cost_pairs is not None:
            return _measure_cost(run_arguments, num_pairs=settings.cost_pairs)
        return _run(settings, run_arguments)
    except ConfigError as error:
        _say(f"error: {' '.join(str(error).split())}")
        return _BAD_INPUT
    except (EngineError, OSError) as error:
        _say(f"error: {error}")
        return _ENGINE_DEAD
    except KeyboardInterrupt:
        _say("stopped")
        return _CTRL_C


def _run(settings: ProfileSettings, run_arguments: Sequence[str]) -> int:
    """An ordinary run, and its profile; no profile of a run that ended before its engine was ready."""
    engines: list[ProfiledEngine] = []

    def open_engine(config: RunConfig) -> ProfiledEngine:
        _check_files(settings)
        engines.append(ProfiledEngine(config, settings))
        return engines[-1]

    status = run_main(run_arguments, open_engine=open_engine)
    for engine in engines:
        if engine.profile is not None:
            write_files(settings, engine.profile)
    return status


def _measure_cost(overrides: Sequence[str], *, num_pairs: int) -> int:
    for override in overrides:
        if override.partition("=")[0] in OWN_KEYS:
            raise ConfigError(
                f"{shown(override)}: with cost_pairs the tool asks its own prompts, and writes no files; "
                "leave this out"
            )
    config = compose(overrides)
    check(config)
    with Engine(resolve_models(config)) as engine:
        print(measure_cost(engine, num_pairs=num_pairs, max_tokens=config.max_tokens).report())
    return 0


def _check_files(settings: ProfileSettings) -> None:
    """Before anything is recorded that could not be kept. Raises `ConfigError`."""
    make_out_folder(Path(settings.out))
    if settings.picture is not None:
        make_out_folder(Path(settings.picture).parent, key="picture")
    if not can_draw():
        _say("matplotlib is not installed, so there will be no picture; pip install matplotlib")


def write_files(settings: ProfileSettings, profile: EngineProfile) -> None:
    """Write everything into `out`, and say what is where."""
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    run = describe(profile)
    timeline = make_timeline(profile)
    rounds = find_rounds(timeline)
    summary = summarise(timeline, rounds, run=run)
    table = markdown(summary)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(table, encoding="utf-8")
    write_trace(folder / "trace.json", profile, timeline, run=run)
    picture = Path(settings.picture) if settings.picture else folder / "rounds.png"
    shown = choose_rounds(rounds, count=settings.rounds, first=settings.first_round) if can_draw() else []
    if shown:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_rounds(picture, timeline, shown, title=run)
    _say(f"\n{table}")
    _say(f"{folder / 'trace.json'}: open it at ui.perfetto.dev")
    if shown:
        _say(f"{picture}: {len(shown)} round{'s' if len(shown) > 1 else ''}")
    elif can_draw():
        _say("no picture: there is no such round")


def describe(profile: EngineProfile) -> str:
    """What was run, in a line."""
    config = msgspec.msgpack.decode(profile.settings, type=RunConfig)
    parts = [
        f"model {model_in_words(config.model)} in {config.model.dtype.value}",
        f"placement {config.placement.name}",
        *speculation_in_words(config.speculation),
    ]
    if config.max_requests > 1:
        parts.append(f"up to {config.max_requests} requests a round")
    return "; ".join(parts)


def _usage() -> str:
    lines = [
        "usage: python -m tools.profile [key=value...]",
        "",
        "Everything that pipeline.run takes (python -m pipeline.run --help), and:",
        "",
    ]
    for key in keys_of(ProfileSettings).values():
        lines += [f"{key.name}={key.default}  ({key.expects})", f"    {key.description}"]
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
