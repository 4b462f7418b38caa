"""Run directories and shared memory: private, swept when abandoned, never when owned."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError, ProtocolError
from pipeline.run_directory import RunDirectory, ipc_address, remove_run, runtime_root, sweep_stale
from pipeline.shm_memory import SHARED_MEMORY, PoolExport, SharedMemoryExporter, SharedMemoryReader
from pipeline.tensor_pool import PoolSpec

SPEC = PoolSpec(name="p", num_slots=2, shape=(3,), dtype="int64")
KILLED_OWNER = """
import os, sys
from pathlib import Path
from pipeline.run_directory import RunDirectory
print(RunDirectory(Path(sys.argv[1])).path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path)
    yield directory
    directory.remove()


def test_a_directory_is_private_and_removed_with_all_that_carries_its_name(directory):
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "socket").touch()
    block = SHARED_MEMORY / f"{directory.path.name}-toy-0"
    block.touch()
    directory.remove()
    directory.remove()
    assert not directory.path.exists()
    assert not block.exists()


def test_a_directory_that_somebody_else_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    path = tmp_path / "ssd-1-00000000"
    path.mkdir()
    scan = os.scandir

    def scan_too_late(folder):
        monkeypatch.setattr(os, "scandir", scan)
        shutil.rmtree(path)
        return scan(folder)

    block = SHARED_MEMORY / f"{path.name}-toy-0"
    block.touch()
    remove_run(path)
    assert not block.exists()
    path.mkdir()
    monkeypatch.setattr("pipeline.run_directory.SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(os, "scandir", scan_too_late)
    remove_run(path)
    assert not path.exists()


def test_what_a_killed_owner_leaves_is_swept_by_the_next_one(tmp_path):
    command = [sys.executable, "-c", KILLED_OWNER, str(tmp_path)]
    left = Path(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
    block = SHARED_MEMORY / f"{left.name}-toy-0"
    block.touch()
    assert left.is_dir()
    RunDirectory(tmp_path).remove()
    assert not left.exists()
    assert not block.exists()


def test_a_directory_whose_owner_lives_is_not_swept_nor_is_anything_else(tmp_path, directory):
    for name in ("ssd-1-nothexad", "ssd-notes", "other"):
        (tmp_path / name).mkdir()
    assert sweep_stale(tmp_path) == []
    assert directory.path.is_dir()


def test_a_directory_without_a_lock_is_swept_only_when_its_process_is_gone(tmp_path):
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE)
    dead = tmp_path / f"ssd-{int(process.stdout)}-00000000"
    alive = tmp_path / f"ssd-{os.getpid()}-00000000"
    for path in (dead, alive):
        path.mkdir()
    assert sweep_stale(tmp_path) == [dead]


def test_a_root_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot make a run directory .*set XDG_RUNTIME_DIR or TMPDIR"):
        RunDirectory(tmp_path / "missing")


def test_a_socket_path_of_107_bytes_is_possible_and_a_longer_one_is_a_clear_error():
    longest = Path("/" + "a" * 106)
    assert ipc_address(longest) == f"ipc://{longest}"
    with pytest.raises(ConfigError, match=r"path of 108 bytes, at most 107.*shorter folder"):
        ipc_address(Path("/" + "a" * 107))
    with pytest.raises(ConfigError, match="path of 109 bytes"):
        ipc_address(Path("/" + "é" * 54))


def test_the_runtime_root_is_taken_from_the_environment_if_it_can_be_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_root() == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert runtime_root() != tmp_path / "missing"


def test_a_pool_is_read_after_its_file_is_unlinked(directory):
    exporter, reader = SharedMemoryExporter(directory.path, "toy"), SharedMemoryReader()
    writer = exporter.export(SPEC)
    pool = reader.attach(exporter.exports[0])
    Path(exporter.exports[0].path).unlink()
    ref = writer.write(np.arange(3))
    np.testing.assert_array_equal(pool.read(ref), np.arange(3))
    for end in (reader, exporter, reader, exporter):
        end.close()


def test_closing_the_exporter_unlinks_what_is_still_there(directory):
    exporter = SharedMemoryExporter(directory.path, "toy")
    exporter.export(SPEC)
    path = Path(exporter.exports[0].path)
    assert path.stat().st_mode & 0o777 == 0o600
    exporter.close()
    assert not path.exists()


def test_a_pool_that_is_missing_or_too_short_is_refused(tmp_path):
    reader = SharedMemoryReader()
    with pytest.raises(ProtocolError, match="cannot open"):
        reader.attach(PoolExport(spec=SPEC, path=str(tmp_path / "missing")))
    short = tmp_path / "short"
    short.write_bytes(bytes(10))
    with pytest.raises(ProtocolError, match="has under 112 bytes"):
        reader.attach(PoolExport(spec=SPEC, path=str(short)))


def test_a_full_shared_memory_falls_back_to_the_run_directory_and_then_fails_at_once(directory, monkeypatch):
    allocate, room = os.posix_fallocate, []

    def allocate_if_room(descriptor, offset, length):
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(room[0])):
            return allocate(descriptor, offset, length)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate_if_room)
    exporter = SharedMemoryExporter(directory.path, "toy")
    with pytest.raises(ConfigError, match=r"no room for 112 bytes of shared memory .*No space left"):
        exporter.export(SPEC)
    room.append(directory.path)
    exporter.export(SPEC)
    assert Path(exporter.exports[0].path).parent == directory.path
    exporter.close()
    assert not list(SHARED_MEMORY.glob(f"{directory.path.name}-*"))
