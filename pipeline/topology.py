"""Which stages a run has, where they come from, and which cores each one gets.

A stage is named by a dotted factory and imported in its own process: the runtime imports no stage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import ConfigError
from pipeline.messages import StageName

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage process."""

    name: StageName
    factory: str
    """`package.module:function`; the function takes a `StageContext` and returns a `Stage`."""
    cores: tuple[int, ...] | None = None
    """Core numbers as the system counts them; None: whatever the supervisor may use."""
    io_cores: tuple[int, ...] | None = None
    """Cores of the thread that moves its mail; None: its own. A stage that computes without a pause keeps its
    cores to itself this way, and its mail does not wait for them."""
    busy_poll_us: int = 0
    """How long the stage watches its inbox, in microseconds, before it sleeps: waking up costs about as much
    as a message. Worth it for a stage that has its cores to itself and soon gets an answer."""
    threads: int = 1
    """Threads of its numeric libraries."""
    has_patient_threads: bool = False
    """Its threads sleep while they wait for one another, where they would else spin: right where other stages
    compute on the same cores, and slow where none does."""


def check_topology(topology: Sequence[StageSpec]) -> None:
    """Raise `ConfigError` unless these stages can run together on this machine."""
    names = [spec.name for spec in topology]
    if not names or len(set(names)) != len(names) or StageName.FRONTEND in names:
        raise ConfigError(
            f"expected each stage at most once, and at least one, got {[n.value for n in names]}"
        )
    usable = usable_cores()
    for spec in topology:
        if not _FACTORY.fullmatch(spec.factory):
            raise ConfigError(f"{spec.name.value}: expected package.module:function, got {spec.factory!r}")
        if spec.threads < 1:
            raise ConfigError(f"{spec.name.value}: expected at least 1 thread, got {spec.threads}")
        for cores in (spec.cores, spec.io_cores):
            if cores is not None and not (cores and set(cores) <= set(usable)):
                raise ConfigError(
                    f"{spec.name.value}: expected some of the cores {list(usable)}, got {list(cores)}"
                )
        if spec.busy_poll_us < 0:
            raise ConfigError(
                f"{spec.name.value}: expected a busy_poll_us of at least 0, got {spec.busy_poll_us}"
            )


def usable_cores() -> tuple[int, ...]:
    """The cores this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
