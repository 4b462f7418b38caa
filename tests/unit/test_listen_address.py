"""Where an engine may serve: an address that is taken, open to others, or none at all ends in one line."""

import os
import socket
import stat

import pytest
import zmq

from pipeline.errors import ConfigError
from pipeline.listen_address import BoundAddress, parse_listen


@pytest.fixture
def router():
    """Makes sockets, and closes what a test leaves open."""
    context = zmq.Context()
    yield lambda: context.socket(zmq.ROUTER)
    context.destroy(linger=0)


def bind(router, given, *, allow_remote=False):
    return BoundAddress(router(), parse_listen(given, allow_remote=allow_remote))


@pytest.mark.parametrize(
    "given",
    [
        "",
        "engine.sock",
        "ipc://",
        "ipc://@abstract",
        "ipc:///tmp/folder/",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:99999",
        "tcp://:5555",
        "tcp://::1:5555",
        "inproc://x",
        "http://127.0.0.1:80",
    ],
)
def test_what_is_no_address_is_refused_with_what_is_one(given):
    with pytest.raises(ConfigError, match=r"expected ipc:///PATH"):
        parse_listen(given, allow_remote=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.168.1.7", "eth0", "example.org", "[::]"])
def test_an_address_that_others_reach_must_be_asked_for_plainly(host):
    with pytest.raises(ConfigError, match=r"no authentication .*allow_remote=true"):
        parse_listen(f"tcp://{host}:5555", allow_remote=False)
    assert parse_listen(f"tcp://{host}:5555", allow_remote=True).text == f"tcp://{host}:5555"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_a_loopback_address_needs_no_permission(host):
    assert parse_listen(f"tcp://{host}:5555", allow_remote=False).path is None


def test_the_name_of_this_host_can_be_bound(router):
    socket_ = router()
    socket_.setsockopt(zmq.IPV6, 1)
    with BoundAddress(socket_, parse_listen("tcp://localhost:0", allow_remote=False)) as bound:
        assert bound.text.startswith("tcp://127.0.0.1:")


def test_a_free_port_is_chosen_and_told_and_a_taken_one_refused(router):
    with bind(router, "tcp://127.0.0.1:*") as first:
        port = int(first.text.rpartition(":")[2])
        assert port > 0
        with pytest.raises(ConfigError, match=rf"listen=tcp://127\.0\.0\.1:{port}: is in use"):
            bind(router, f"tcp://127.0.0.1:{port}")


def test_two_engines_cannot_have_one_path_and_the_first_keeps_it(router, tmp_path):
    given = f"ipc://{tmp_path / 'engine.sock'}"
    with bind(router, given):
        inode = os.stat(tmp_path / "engine.sock").st_ino
        with pytest.raises(ConfigError, match="another engine serves there; choose another address"):
            bind(router, given)
        assert os.stat(tmp_path / "engine.sock").st_ino == inode
    assert list(tmp_path.iterdir()) == []
    with bind(router, given) as again:
        assert again.text == given


def test_only_the_user_can_connect(router, tmp_path):
    with bind(router, f"ipc://{tmp_path / 'engine.sock'}"):
        assert stat.S_IMODE(os.stat(tmp_path / "engine.sock").st_mode) & 0o077 == 0


def test_a_file_is_never_deleted_for_a_socket(router, tmp_path):
    path = tmp_path / "answers.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="a file lies there"):
        bind(router, f"ipc://{path}")
    assert path.read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["answers.txt"]


def test_a_socket_of_another_program_is_left_alone_and_one_of_a_dead_program_replaced(router, tmp_path):
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="another program serves there"):
            bind(router, f"ipc://{path}")
        assert path.exists()
    with bind(router, f"ipc://{path}"):
        pass
    assert not path.exists()


def test_a_folder_that_does_not_exist_and_a_path_that_is_too_long_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder .*missing; make it"):
        parse_listen(f"ipc://{tmp_path}/missing/engine.sock", allow_remote=False)
    with pytest.raises(ConfigError, match="at most 107"):
        parse_listen(f"ipc://{tmp_path}/{'x' * 120}", allow_remote=False)


def test_a_relative_path_counts_from_here(router, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with bind(router, "ipc://engine.sock") as bound:
        assert bound.text == f"ipc://{tmp_path}/engine.sock"
