"""Running toy stages in processes, and looking for what they leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.messages import StageName
from pipeline.run_directory import runtime_root
from pipeline.supervisor import Supervisor
from pipeline.topology import StageSpec
from tests.processes.toy_stages import Item, Settings

TOKENIZER, VERIFIER, SPECULATOR = StageName.TOKENIZER, StageName.VERIFIER, StageName.SPECULATOR
PREDICTOR, DETOKENIZER, FRONTEND = StageName.PREDICTOR, StageName.DETOKENIZER, StageName.FRONTEND


def toy(name: StageName, kind: str, **fields: object) -> StageSpec:
    return StageSpec(name=name, factory=f"tests.processes.toy_stages:{kind}", **fields)


def supervise(
    stages: dict[StageName, str], settings: Settings | None = None, **options: object
) -> Supervisor:
    """A supervisor for toy stages, by class name; not started."""
    encoded = msgspec.msgpack.encode(settings or Settings())
    topology = [toy(name, kind) for name, kind in stages.items()]
    return Supervisor(topology, encoded, frontend_accepts=Item, **options)


def collect(supervisor: Supervisor, count: int, timeout_s: float = 20.0) -> list[Item]:
    """The next `count` messages for the frontend."""
    items: list[Item] = []
    deadline = time.monotonic() + timeout_s
    while len(items) < count:
        items += supervisor.poll(1.0)
        assert time.monotonic() < deadline, f"{len(items)} of {count} messages came in {timeout_s} s"
    return items


def wait_until(
    condition: Callable[[], bool], timeout_s: float = 10.0, what: Callable[[], str] = lambda: "not so"
) -> None:
    """Poll a condition of the system that announces itself to nobody, such as the end of a process; `what`
    tells how things stand when it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what()} after {timeout_s} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def traces(pid: int | None = None) -> set[str]:
    """Run directories and shared memory of the engines that process `pid` (this one) has started."""
    prefix = f"ssd-{pid or os.getpid()}-"
    places = [Path("/dev/shm"), runtime_root()]
    return {str(path) for place in places for path in place.glob(f"{prefix}*")}


def children() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    pids = set()
    for task in Path("/proc/self/task").iterdir():
        pids |= set(map(int, (task / "children").read_text().split()))
    return pids


def open_files() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))
