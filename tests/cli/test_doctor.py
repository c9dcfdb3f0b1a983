"""The findings of the doctor, with real folders, sockets and processes."""

import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from aiotensor import TensorReceiver
from aiotensor.broadcast import Publisher
from aiotensor.channel import MessageServer
from aiotensor.cli import doctor as checks
from aiotensor.cli.doctor import (
    Finding,
    Status,
    container,
    huge_pages,
    memory,
    open_files,
    socket_file,
    socket_folder,
)
from tests.cli import commands
from tests.cli.commands import Pair
from verification.places import free_port

GIB = 1 << 30

Findings = dict[str, dict[str, str]]


async def doctor(*arguments: str) -> tuple[int, Findings]:
    done = await commands.run("doctor", "--json", *arguments)
    assert done.stderr == ""
    return done.exit_code, {finding["check"]: finding for finding in json.loads(done.stdout)}


def problems(findings: Findings) -> list[str]:
    return [check for check, finding in findings.items() if finding["status"] == "problem"]


def check(finding: Finding, status: Status, found: str, advice: str = "") -> None:
    assert finding.status is status
    assert found in finding.found
    assert advice in (finding.advice or "")
    assert (finding.advice is None) == (status is Status.OK)


# The command


def test_doctor_prints_one_line_per_check_and_finds_no_problem_on_this_machine() -> None:
    done = subprocess.run(commands.aiotensor("doctor"), capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()

    names = ["software", "socket folder", "memory", "container", "open files", "huge pages"]
    assert [line.partition("  ")[2].partition(":")[0].strip() for line in lines[:-1]] == names
    assert lines[0].startswith("ok       software: aiotensor ")
    assert lines[-1].startswith("all requirements are met; problems: 0, notes: ")
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


async def test_a_problem_is_reported_with_advice_and_exit_status_1(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/missing/socket"
    done = await commands.run("doctor", "--address", address)
    status, findings = await doctor("--address", address)

    assert done.exit_code == status == 1
    assert problems(findings) == ["socket folder"]
    [line] = (line for line in done.stdout.splitlines() if line.startswith("problem"))
    assert line == (
        f"problem  socket folder: {tmp_path}/missing does not exist. Create it: mkdir -p -m 700 "
        f"{tmp_path}/missing, or choose another path"
    )
    assert "some requirements are not met; problems: 1" in done.stdout
    for finding in findings.values():
        assert list(finding) == ["check", "status", "found", "advice"]


# Unix sockets


@contextmanager
def bound(path: Path) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as sock:
        sock.bind(str(path))
        yield sock


async def test_the_process_that_listens_at_a_socket_is_named(address: str) -> None:
    async with MessageServer(address, int) as server:
        status, findings = await doctor("--address", address)
        assert server.statistics().clients_refused == 0
    after, free = await doctor("--address", address)

    assert (status, after) == (0, 0)
    assert "is in use by a process of this user" in findings["socket file"]["found"]
    assert findings["listener"]["found"] == f"a server (pid {os.getpid()}) answers"
    assert "nothing exists at" in free["socket file"]["found"]
    assert "listener" not in free


async def test_a_listener_that_is_no_receiver_is_a_problem(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_ANSWER_S", 0.1)
    with bound(Path(address.removeprefix("unix://"))) as sock:
        sock.listen()
        status, findings = await doctor("--address", address)
    os.unlink(address.removeprefix("unix://"))

    assert (status, problems(findings)) == (1, ["listener"])
    assert "has not answered for 0.1 s" in findings["listener"]["found"]
    assert "a process of aiotensor" in findings["listener"]["advice"]


def test_a_private_folder_is_ok_and_is_not_modified(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)  # longer than the path of a socket may be
    folder.mkdir()

    check(socket_folder(folder), Status.OK, "this user can create sockets")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("asked_for", "status"), [(True, Status.PROBLEM), (False, Status.NOTE)])
def test_an_unusable_folder_is_a_problem_only_if_it_was_given(
    tmp_path: Path, asked_for: bool, status: Status
) -> None:
    (file := tmp_path / "file").touch()

    for folder, found, advice in (
        (tmp_path / "missing", "does not exist", "mkdir -p -m 700"),
        (file, "is not a folder", "another path"),
        (file / "below", "cannot be examined", "another path"),
        (Path("/sys"), "no socket can be created", "writable"),  # not even by root
    ):
        check(socket_folder(folder, asked_for=asked_for), status, found, advice)


def test_a_folder_where_others_could_replace_a_socket_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    check(socket_folder(tmp_path), Status.NOTE, "writable by all users", f"chmod o-w {tmp_path}")
    tmp_path.chmod(0o1777)
    check(socket_folder(tmp_path), Status.OK, "this user can create sockets")
    facts = [*tmp_path.stat()]
    facts[stat.ST_UID] = 4321
    monkeypatch.setattr(Path, "stat", lambda _: os.stat_result(facts))
    check(socket_folder(tmp_path), Status.NOTE, "belongs to user 4321", "a folder of your own")


def test_existing_files_at_the_path_of_a_socket_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with bound(tmp_path / "socket") as sock:
        sock.listen()
        sock.setblocking(False)
        live, is_in_use = socket_file(tmp_path / "socket")
        assert is_in_use
        check(live, Status.OK, "in use by a process of this user")
        with pytest.raises(BlockingIOError):
            sock.accept()  # the check makes no connection
    for path, status, found, advice in (
        (tmp_path / "socket", Status.OK, "was left by a process that has ended", ""),
        (tmp_path / "missing" / "socket", Status.OK, "nothing exists", ""),
        (tmp_path / "file", Status.PROBLEM, "is not a socket", "Move it away"),
        (tmp_path / "loop", Status.PROBLEM, "Too many levels", "another path"),
    ):
        finding, is_in_use = socket_file(path)
        assert not is_in_use
        check(finding, status, found, advice)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    check(socket_file(tmp_path / "socket")[0], Status.PROBLEM, "socket of user", "Run as that user")


def test_a_removed_socket_file_of_a_running_process_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with bound(path) as sock:
        sock.listen()
        path.unlink()
        finding, is_in_use = socket_file(path)
        check(finding, Status.PROBLEM, "its socket file was removed", "Restart it")
        assert not is_in_use
    check(socket_file(path)[0], Status.OK, "nothing exists")


# Ports


@pytest.fixture
def port() -> int:
    return free_port()


async def test_the_process_that_listens_at_a_port_is_named(port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    async with TensorReceiver(address):
        status, findings = await doctor("--address", address)
    after, free = await doctor("--address", address)

    assert (status, after) == (0, 1)
    names = list(findings)
    assert names[1 : names.index("memory")] == ["keys", "host", "port", "listener"]
    assert findings["port"]["found"] == f"a process accepts connections at 127.0.0.1 port {port}"
    assert findings["listener"]["found"] == f"a receiver (pid {os.getpid()}) answers"
    assert problems(free) == ["port"]
    where = f"127.0.0.1 port {port}"
    assert free["port"]["found"] == f"no process accepts connections at {where}: Connection refused"
    assert free["port"]["advice"].startswith("Start the process that listens there")


async def test_keys_are_tried_and_never_shown(port: int, tmp_path: Path) -> None:
    ours, theirs = Pair.new(), Pair.new()
    keys = ("--address", f"tcp://0.0.0.0:{port}", "--keys")
    at_server = {"secret_key": theirs.secret, "client_keys": [ours.public]}
    async with Publisher(f"tcp://127.0.0.1:{port}", **at_server):  # type: ignore[arg-type]
        accepted, findings = await doctor(*keys, ours.file(tmp_path, theirs.public))
        refused, others = await doctor(*keys, ours.file(tmp_path, ours.public))

    assert (accepted, refused) == (0, 1)
    assert findings["listener"]["found"].startswith("a publisher (pid ")
    assert ours.public in findings["keys"]["found"]
    assert problems(others) == ["listener"]
    assert "do not match" in others["listener"]["found"]
    assert ours.secret not in json.dumps([findings, others])


async def test_missing_keys_are_a_problem_and_the_port_is_still_checked(port: int) -> None:
    async with TensorReceiver(f"tcp://127.0.0.1:{port}"):
        status, findings = await doctor("--address", f"tcp://0.0.0.0:{port}")

    assert (status, problems(findings)) == (1, ["keys"])
    for words in ("--keys", "api.json", "`aiotensor keys`"):
        assert words in findings["keys"]["advice"]
    assert findings["port"]["status"] == "ok"
    assert "listener" not in findings


async def test_a_name_that_cannot_be_resolved_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, *_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    _, findings = await doctor("--address", "tcp://unknown.invalid:5555")
    assert findings["host"]["status"] == "problem"
    assert findings["host"]["found"] == "unknown.invalid cannot be resolved: Name or service not known"
    assert "/etc/resolv.conf" in findings["host"]["advice"]


async def test_a_port_that_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_CONNECT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),  # which is not accepted
    ):
        _, silent = await doctor("--address", f"tcp://127.0.0.1:{full.getsockname()[1]}")

    assert problems(silent) == ["port"]
    assert silent["port"]["found"].endswith(": no answer for 0.2 s")
    assert "firewalls" in silent["port"]["advice"]


# Limits


@pytest.mark.parametrize(("kib", "status"), [(1 << 20, Status.OK), ((1 << 20) - 1, Status.NOTE)])
def test_available_memory_is_compared_with_the_arena(kib: int, status: Status, tmp_path: Path) -> None:
    check(memory(GIB, tmp_path), Status.NOTE, "does not report", "Mount /proc")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:  99 kB\nMemAvailable:   {kib} kB\nBuffers:  1 kB\n")

    check(memory(GIB, tmp_path), status, "an arena of 1.0 GiB")


def machine(root: Path, groups: str, limits: dict[str, object]) -> Path:
    """Write the files of /proc and /sys that describe control groups."""
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, None),
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/memory.max": "max"}, None),
        (
            "0::/a/b",
            {"sys/fs/cgroup/a/b/memory.max": 4 * GIB, "sys/fs/cgroup/a/memory.max": GIB // 2},
            "512.0 MiB (/sys/fs/cgroup/a/memory.max)",
        ),
        # In a container, the path of the group may not be visible.
        ("0::/../../elsewhere", {"sys/fs/cgroup/memory.max": GIB}, "1.0 GiB (/sys/fs/cgroup/memory.max)"),
        (
            "5:cpu,cpuacct:/c\n4:memory:/docker/7\n0::/",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": GIB,
                "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000,
            },
            "1.0 GiB (/sys/fs/cgroup/memory/memory.limit_in_bytes)",
        ),
    ],
)
def test_the_lowest_memory_limit_of_the_control_groups_is_found(
    groups: str, limits: dict[str, object], expected: str | None, tmp_path: Path
) -> None:
    found = container(GIB, machine(tmp_path, groups, limits)).found

    assert found == "no memory limit" if expected is None else expected in found


def test_the_memory_limit_must_cover_the_arena_and_the_processes(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/", {"sys/fs/cgroup/memory.max": GIB + (512 << 20)})

    check(container(GIB, root), Status.OK, "enough for an arena of 1.0 GiB")
    check(container(GIB + 1, root), Status.NOTE, "too little", "MemoryMax=")


def test_descriptors_are_compared_with_the_number_of_subscribers() -> None:
    check(open_files(192, 192, 64), Status.OK, "64 subscribers")
    check(open_files(RLIM_INFINITY, RLIM_INFINITY, 10_000), Status.OK, "10000 subscribers")
    check(open_files(191, 4096, 64), Status.NOTE, "at most 191 descriptors", "ulimit -n 1024 ")
    check(open_files(10, 63, 1), Status.NOTE, "need 66", "the hard limit of 63 first")
    assert "hard limit" not in (open_files(191, 4096, 64).advice or "")


def test_the_setting_for_huge_pages_is_shown(tmp_path: Path) -> None:
    check(huge_pages(tmp_path), Status.OK, "not supported")
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    file.parent.mkdir(parents=True)
    file.write_text("always within_size [advise] never deny force\n")

    check(huge_pages(tmp_path), Status.OK, 'shmem_enabled is "advise"')
