"""Checks of the folders and files of sockets, with real folders and real sockets."""

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from aiotensor.cli.doctor import folder as room
from aiotensor.cli.doctor.finding import Finding, Status
from aiotensor.cli.doctor.folder import default_folder, socket_file, socket_folder


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, so that the paths of sockets are short enough in every test."""
    with tempfile.TemporaryDirectory(prefix="aiotensor-", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def bound(path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, kind)) as sock:
        sock.bind(str(path))
        yield sock


def is_problem(finding: Finding, found: str, advice: str) -> bool:
    assert finding.advice is not None
    assert found in finding.found
    assert advice in finding.advice
    return finding.status is Status.PROBLEM


def test_a_private_folder_is_ok_and_is_not_modified(tmp_path: Path) -> None:
    assert socket_folder(tmp_path, asked_for=True).status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_have_a_longer_path_than_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()

    assert socket_folder(folder, asked_for=True).status is Status.OK


def test_a_missing_folder_that_an_engine_creates_needs_a_usable_parent(tmp_path: Path) -> None:
    found = socket_folder(tmp_path / "engine", asked_for=True, is_created=True)
    assert (found.status, found.found) == (Status.OK, f"the engine creates {tmp_path}/engine")
    missing = socket_folder(tmp_path / "missing" / "engine", asked_for=True, is_created=True)
    assert is_problem(missing, f"{tmp_path}/missing does not exist", "mkdir -p -m 700")


@pytest.mark.parametrize("asked_for", [True, False])
def test_an_unusable_folder_is_a_problem_only_if_it_was_given(tmp_path: Path, asked_for: bool) -> None:
    file = tmp_path / "file"
    file.touch()

    for finding, found, advice in [
        (socket_folder(tmp_path / "missing", asked_for=asked_for), "does not exist", "mkdir -p -m 700"),
        (socket_folder(file, asked_for=asked_for), "is not a folder", "another path"),
        (socket_folder(file / "below", asked_for=asked_for), "cannot be examined", "another path"),
        # No user can make a socket there, not even root.
        (socket_folder(Path("/sys"), asked_for=asked_for), "no socket can be created", "writable"),
    ]:
        assert is_problem(finding, found, advice) is asked_for


def test_a_file_system_without_sockets_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(room, "_make_a_socket", fail)

    assert is_problem(socket_folder(tmp_path, asked_for=True), "Operation not supported", "another path")


def test_a_world_writable_folder_needs_the_sticky_bit(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    open_to_all = socket_folder(tmp_path, asked_for=True)
    tmp_path.chmod(0o1777)
    sticky = socket_folder(tmp_path, asked_for=True)

    assert open_to_all.status is Status.NOTE
    assert open_to_all.advice is not None
    assert f"chmod o-w {tmp_path}" in open_to_all.advice
    assert sticky.status is Status.OK


def test_the_folder_of_another_user_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [*tmp_path.stat()]
    facts[stat.ST_UID] = 4321
    monkeypatch.setattr(Path, "stat", lambda _: os.stat_result(facts))

    finding = socket_folder(tmp_path, asked_for=True)

    assert finding.status is Status.NOTE
    assert "belongs to user 4321" in finding.found


def test_a_socket_path_that_does_not_exist_is_ok(short: Path) -> None:
    assert socket_file(short / "socket").status is Status.OK
    assert socket_file(short / "missing" / "socket").status is Status.OK


def test_the_limit_on_the_path_length_is_that_of_the_kernel(short: Path) -> None:
    longest = short / ("x" * (106 - len(bytes(short))))
    longer = Path(f"{longest}x")

    assert len(bytes(longest)) == 107
    assert socket_file(longest).status is Status.OK
    with bound(longest):
        pass
    assert is_problem(socket_file(longer), "108 bytes", "shorter")
    with pytest.raises(OSError, match="too long"), bound(longer):
        pass


def test_the_path_length_is_counted_in_bytes(short: Path) -> None:
    assert socket_file(short / ("é" * 45)).status is Status.PROBLEM


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_live_and_stale_sockets_are_distinguished_without_side_effects(
    short: Path, kind: socket.SocketKind
) -> None:
    path = short / "socket"
    with bound(path, kind) as listener:
        listener.listen()
        listener.setblocking(False)
        live = socket_file(path)
        with pytest.raises(BlockingIOError):
            listener.accept()
    stale = socket_file(path)

    assert live.status is Status.OK
    assert "in use" in live.found
    assert stale.status is Status.OK
    assert "was left by a process that has ended" in stale.found


def test_a_datagram_socket_is_a_problem(short: Path) -> None:
    with bound(short / "socket", socket.SOCK_DGRAM):
        assert is_problem(socket_file(short / "socket"), "another program", "another path")


def test_the_socket_of_another_user_is_a_problem(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(short / "socket"):
        monkeypatch.setattr(os, "geteuid", lambda: 4321)

        assert is_problem(socket_file(short / "socket"), "socket of user", "Run as that user")


def test_a_file_that_is_no_socket_is_a_problem(short: Path) -> None:
    (short / "socket").touch()

    assert is_problem(socket_file(short / "socket"), "is not a socket", "Move it away")


def test_a_symlink_loop_is_a_problem(short: Path) -> None:
    (short / "socket").symlink_to(short / "socket")

    assert is_problem(socket_file(short / "socket"), "Too many levels", "another path")


def test_a_socket_without_permission_to_connect_is_a_problem(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(socket.socket):
        def connect(self, _: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with bound(short / "socket"):
        monkeypatch.setattr(socket, "socket", Refused)

        assert is_problem(socket_file(short / "socket"), "Permission denied", "another path")


def test_the_default_folder_is_xdg_runtime_dir_or_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError

    assert default_folder({"XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/run/user/1")
    assert default_folder({}) == Path(tempfile.gettempdir())
    assert default_folder({"XDG_RUNTIME_DIR": ""}) == Path(tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert default_folder({}) == Path("/tmp")
