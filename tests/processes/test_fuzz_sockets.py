"""Random and forged bytes on every socket: nothing raised, nothing executed, all counted, the engine up."""

import random
import socket
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from pipeline.mailbox import Header
from pipeline.messages import StageName
from tests.processes.runtime import FRONTEND, PREDICTOR, SPECULATOR, TOKENIZER, collect, supervise, traces
from tests.processes.toy_stages import Item, Settings

STAGES = {TOKENIZER: "Echo", SPECULATOR: "TensorWriter", PREDICTOR: "TensorReader"}
encode = msgspec.msgpack.encode


def forged_frames(generator: random.Random) -> list[list[bytes]]:
    """Frames of every kind that must be refused; epoch 1 is never the run's."""
    header = encode(Header(StageName.TOKENIZER, 1, 0))
    item = encode(Item(number=1))
    noise = [generator.randbytes(generator.randrange(200)) for _ in range(100)]
    return [
        *([frame] for frame in noise),
        *([header, frame] for frame in noise),
        *([frame, item] for frame in noise),
        *([generator.choice(noise) for _ in range(generator.randrange(1, 6))] for _ in range(100)),
        [header, item],
        [header, item, item],
        [header],
        [b"", b""],
        [encode(["nobody", 1, 0]), item],
        [encode([StageName.TOKENIZER, "1", 0]), item],
        [encode([StageName.TOKENIZER, 1, 0, 0]), item],
        [b"\x91" * 100_000, b"\x91" * 100_000],  # arrays in arrays in arrays
        [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"],  # four billion elements, announced
        [b"cos\nsystem\n(S'touch /tmp/executed'\ntR.", b"\x80\x04N."],  # pickles
    ]


def sockets_of(pid_traces: set[str]) -> list[Path]:
    (directory,) = [Path(path) for path in pid_traces]
    return [path for path in directory.iterdir() if path.is_socket()]


@pytest.fixture
def push():
    """Sends frames to a path with a socket of the given type."""
    context = zmq.Context()

    def push(path: Path, kind: int, frames: list[list[bytes]]) -> None:
        with context.socket(kind) as sender:
            sender.linger = 5000
            sender.connect(f"ipc://{path}")
            for one in frames:
                sender.send_multipart(one)

    yield push
    context.term()


def test_forged_frames_on_every_inbox_are_dropped_and_counted(push):
    frames = forged_frames(random.Random(1))
    with supervise(STAGES, Settings()) as engine:
        for path in sockets_of(traces()):
            if path.name not in ("control", "profile"):
                push(path, zmq.PUSH, frames)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert engine.poll(0) == []
            stats = engine.stats()
            if all(stats[name].num_dropped >= len(frames) for name in STAGES):
                break
        assert {stats[name].num_dropped for name in STAGES} == {len(frames)}
        assert {stats[name].num_refused for name in STAGES} == {0}
        engine.send(TOKENIZER, Item(number=1))
        engine.send(SPECULATOR, Item(number=2))
        assert {item.number for item in collect(engine, 2)} == {1, 2}


@pytest.mark.parametrize("name", ["control", "profile"])
def test_forged_frames_on_the_other_sockets_are_dropped_and_the_engine_still_stops(push, name):
    with supervise(STAGES, Settings()) as engine:
        (path,) = [path for path in sockets_of(traces()) if path.name == name]
        push(path, zmq.DEALER, forged_frames(random.Random(2)))
        for _ in range(3):
            assert len(engine.stats()) == 3
            engine.send(TOKENIZER, Item(number=1))
            collect(engine, 1)
    assert not traces()


def test_bytes_that_are_not_even_zeromq_harm_nothing():
    generator = random.Random(3)
    with supervise(STAGES, Settings()) as engine:
        for path in sockets_of(traces()):
            for size in (0, 1, 10, 64, 5000):
                with socket.socket(socket.AF_UNIX) as raw:
                    raw.connect(str(path))
                    raw.settimeout(5)
                    try:
                        raw.sendall(generator.randbytes(size))
                        raw.recv(100)
                    except OSError:
                        pass  # the other side has hung up already, as it should
        engine.send(TOKENIZER, Item(number=1))
        assert collect(engine, 1) == [Item(number=1)]


def test_run_directories_are_private():
    with supervise({TOKENIZER: "Echo"}):
        (directory,) = [Path(path) for path in traces()]
        assert directory.stat().st_mode & 0o777 == 0o700
        names = {path.name for path in sockets_of(traces())}
    assert names == {"control", "profile", TOKENIZER.value, FRONTEND.value}
