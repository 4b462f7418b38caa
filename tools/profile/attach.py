"""Profiles an engine that runs already, from outside."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.errors import ConfigError, shown, shown_path
from pipeline.interrupts import Interrupts
from pipeline.profiling import EngineProfile, ProfileClient
from pipeline.run_directory import live_runs, runtime_root
from tools.profile.settings import ProfileSettings


def profile_running(settings: ProfileSettings) -> EngineProfile:
    """Record for `seconds`; Ctrl-C and SIGTERM end it early.

    An engine whose profiler went without a word would record on and on.
    Raises `ConfigError`, `EngineDead` and `RequestError`.
    """
    assert settings.attach is not None
    with ProfileClient(find_run(settings.attach)) as client, Interrupts():
        client.start(num_spans=settings.num_spans, traces_kernels=settings.torch_profiler)
        try:
            time.sleep(settings.seconds)
        except KeyboardInterrupt:
            return client.end()
        return client.end()


def find_run(attach: str) -> Path:
    """The run directory of the engine that `attach` names. Raises `ConfigError`, which lists what runs."""
    runs = live_runs(runtime_root())
    if attach == "any":
        found = runs
    elif attach.isdecimal():
        found = [run for run in runs if run.name.startswith(f"ssd-{attach}-")]
    else:
        path = Path(attach).absolute()
        found = [path] if path in live_runs(path.parent) else []
    if len(found) == 1:
        return found[0]
    running = ", ".join(shown_path(run) for run in runs) or f"none in {runtime_root()}"
    raise ConfigError(
        f"attach={shown(attach)} names {len(found) or 'no'} running engines, expected one; running: {running}"
    )
