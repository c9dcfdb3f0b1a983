"""Checks of tcp:// addresses, with real sockets, receivers and publishers."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from aiotensor import TensorReceiver
from aiotensor.broadcast import Publisher
from aiotensor.cli.command import aiotensor as command
from aiotensor.cli.doctor import network
from aiotensor.cli.doctor.finding import Finding, Status
from aiotensor.cli.doctor.network import Place, buffers, examine, packets
from aiotensor.cli.keys import Keys
from aiotensor.transports.zeromq.addresses import parse
from tests.cli.commands import Pair
from verification.places import free_port

LOCAL = Place(socket.AF_INET, ("127.0.0.1", 1))
LOCAL_6 = Place(socket.AF_INET6, ("::1", 1, 0, 0))


async def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command in another thread, which does not block the loop."""
    done = await asyncio.to_thread(CliRunner().invoke, command, ["doctor", "--json", *arguments])
    assert done.stderr == ""
    return done.exit_code, {finding["check"]: finding for finding in json.loads(done.stdout)}


def problems(findings: dict[str, Finding]) -> list[str]:
    return [check for check, finding in findings.items() if finding.status is Status.PROBLEM]


def advice_of(finding: Finding) -> str:
    assert finding.advice is not None
    return finding.advice


@contextmanager
def listening(backlog: int = 8) -> Iterator[int]:
    """Listen at a port as another program, which never answers."""
    with socket.create_server(("127.0.0.1", free_port()), backlog=backlog) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def ours() -> Pair:
    return Pair.new()


@pytest.fixture
def theirs() -> Pair:
    return Pair.new()


# The command


async def test_a_loopback_address_is_checked_in_addition_to_the_machine() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with TensorReceiver(address) as receiver:
        status, findings = await doctor("--address", address)
        assert receiver.statistics().senders_refused == 0
    after, free = await doctor("--address", address)

    assert (status, after) == (0, 1)
    checks = list(findings)
    assert checks[checks.index("address") : checks.index("memory")] == [
        *("address", "host", "listener", "handshake", "packets", "TCP buffers")
    ]
    assert "a process accepts connections at 127.0.0.1" in findings["listener"]["found"]
    assert findings["handshake"]["found"].startswith("a receiver (pid ")
    assert free["listener"]["status"] == "problem"
    assert "can listen at 127.0.0.1" in free["listener"]["found"]
    assert "Start the receiver" in free["listener"]["advice"]
    assert "handshake" not in free


async def test_keys_are_tried_with_a_handshake(ours: Pair, theirs: Pair, tmp_path: Path) -> None:
    port = free_port()
    address, file = f"tcp://0.0.0.0:{port}", ours.secret_file(tmp_path)
    at_server = {"secret_key": theirs.secret, "client_keys": [ours.public]}
    async with Publisher(f"tcp://127.0.0.1:{port}", **at_server):  # type: ignore[arg-type]
        accepted, findings = await doctor(
            "--address", address, "--server-key", theirs.public, "--secret-key-file", file
        )
        refused, others = await doctor(
            "--address", address, "--server-key", ours.public, "--secret-key-file", file
        )

    assert (accepted, refused) == (0, 1)
    assert findings["handshake"]["found"].startswith("a publisher (pid ")
    assert findings["handshake"]["found"].endswith("answers, and accepts the keys")
    assert ours.public in findings["keys"]["found"]
    assert others["handshake"]["status"] == "problem"
    assert "client_keys" in others["handshake"]["advice"]
    assert ours.secret not in json.dumps([findings, others])


@pytest.mark.parametrize(
    "address", ["tcp://host", "tcp://:5555", "tcp://*:5555", "tcp://host:0", "tcp:host:1"]
)
def test_doctor_rejects_an_address_without_a_host_or_port(address: str) -> None:
    result = CliRunner().invoke(command, ["doctor", "--address", address])

    assert result.exit_code == 2
    assert "--address" in result.output
    assert repr(address) in result.output


# The address and its host


async def test_missing_keys_are_a_problem_and_the_network_is_still_checked() -> None:
    async with TensorReceiver(f"tcp://127.0.0.1:{(port := free_port())}"):
        findings = await examine(f"tcp://0.0.0.0:{port}", Keys())

    assert problems(findings) == ["address"]
    assert "only 127.0.0.1, ::1 and localhost work without keys" in findings["address"].found
    for words in ("--server-key", "--secret-key-file", "AIOTENSOR_SECRET_KEY", "zmq.curve_keypair()"):
        assert words in advice_of(findings["address"])
    assert findings["listener"].status is Status.OK
    assert "handshake" not in findings


async def test_all_addresses_of_a_name_are_named() -> None:
    with listening() as port:
        found, places = await network._host(parse(f"tcp://localhost:{port}", has_keys=False))
        listener, reached = await network._listener(places)

    assert found == Finding(Status.OK, "localhost resolves to 127.0.0.1, ::1")
    assert reached == places[0]
    assert listener.status is Status.OK
    assert listener.found.startswith("a process accepts connections at 127.0.0.1 (::1: ")


async def test_a_name_that_does_not_exist_is_a_problem() -> None:
    findings = await examine("tcp://no-such-host.invalid:5555", Keys())

    assert problems(findings) == ["address", "host"]
    assert findings["host"].found.startswith("no-such-host.invalid cannot be resolved: ")
    assert "/etc/resolv.conf" in advice_of(findings["host"])
    assert list(findings) == ["address", "host", "TCP buffers"]


async def test_the_wait_for_a_silent_name_server_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def resolve(*_: object, **__: object) -> list[object]:
        answers.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(network, "_LOOKUP_S", 0.05)
    try:
        findings = await examine("tcp://host:5555", Keys())
    finally:
        answers.set()

    assert findings["host"].status is Status.PROBLEM
    assert "no name server has answered for 0.05 s" in findings["host"].found


# The process that listens


async def test_a_bound_port_without_a_listener_is_a_problem() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        findings = await examine(f"tcp://127.0.0.1:{taken.getsockname()[1]}", Keys())

    assert problems(findings) == ["listener"]
    assert "127.0.0.1: Address already in use" in findings["listener"].found
    assert "another port" in advice_of(findings["listener"])


async def test_refused_and_unanswered_connections_are_distinguished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "_is_ours", lambda _: False)
    monkeypatch.setattr(network, "_CONNECT_S", 0.2)
    refused = await examine(f"tcp://127.0.0.1:{free_port()}", Keys())
    with listening(backlog=0) as port, socket.create_connection(("127.0.0.1", port)):
        # The connection is not accepted, so the backlog is full.
        silent = await examine(f"tcp://127.0.0.1:{port}", Keys())

    assert refused["listener"].status is Status.PROBLEM
    assert "127.0.0.1: Connection refused" in refused["listener"].found
    assert "Start the receiver" in advice_of(refused["listener"])
    assert silent["listener"].status is Status.PROBLEM
    assert "127.0.0.1: no answer for 0.2 s" in silent["listener"].found
    assert "firewalls" in advice_of(silent["listener"])
    assert "handshake" not in silent


async def test_a_listener_that_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_ANSWER_S", 0.2)
    with listening() as port:
        findings = await examine(f"tcp://127.0.0.1:{port}", Keys())

    assert problems(findings) == ["handshake"]
    assert "has not answered for 0.2 s" in findings["handshake"].found
    assert "whether it uses keys" in advice_of(findings["handshake"])


@pytest.mark.parametrize("is_known", [True, False])
async def test_only_known_keys_are_accepted(is_known: bool, ours: Pair, theirs: Pair) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    known = ours if is_known else theirs
    async with TensorReceiver(address, secret_key=theirs.secret, client_keys=[known.public]):
        findings = await examine(address, Keys(ours.secret, theirs.public))

    assert problems(findings) == ([] if is_known else ["handshake"])
    if not is_known:
        assert (
            "the keys of this process and of the one that listens there do not match"
            in findings["handshake"].found
        )
        assert "public key of this side" in advice_of(findings["handshake"])


async def test_a_receiver_that_requires_keys_is_detected(theirs: Pair) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with TensorReceiver(address, secret_key=theirs.secret, client_keys=[theirs.public]):
        findings = await examine(address, Keys())
        for _ in range(4):  # on a busy machine, the end of each connection may arrive before the reason
            if "has not answered" in findings["handshake"].found:
                findings = await examine(address, Keys())

    assert problems(findings) == ["handshake"]
    assert "requires keys" in findings["handshake"].found
    assert "--server-key" in advice_of(findings["handshake"])


# The network


def write_mtu(root: Path, mtu: str) -> None:
    file = root / "sys/class/net/lo/mtu"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{mtu}\n")


def write_buffers(root: Path, **limits: str) -> None:
    for name, limit in limits.items():
        file = root / "proc/sys/net" / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("place", [LOCAL, LOCAL_6])
def test_a_small_mtu_of_the_interface_is_a_note(
    place: Place, is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inet6 = tmp_path / "proc/net/if_inet6"
    inet6.parent.mkdir(parents=True)
    inet6.write_text(f"fe80{'0' * 27}1 02 40 20 80     eth0\n{'0' * 31}1 01 80 10 80       lo\n")
    monkeypatch.setattr(network, "_is_ours", lambda _: is_ours)  # else it is found by its address
    write_mtu(tmp_path, "1500")
    enough = packets(place, tmp_path)
    write_mtu(tmp_path, "1420")
    small = packets(place, tmp_path)

    assert enough == Finding(Status.OK, "at most 1500 bytes (MTU) through lo")
    assert small.status is Status.NOTE
    assert small.found.startswith("at most 1420 bytes (MTU) through lo, fewer than the 1500")
    assert "ip link set lo mtu 1500" in advice_of(small)


def test_an_interface_that_is_not_known_is_a_note(tmp_path: Path) -> None:
    finding = packets(LOCAL, tmp_path)

    assert finding.status is Status.NOTE
    assert "the interface of 127.0.0.1 is unknown" in finding.found


def test_an_address_without_a_route_is_a_note() -> None:
    finding = packets(Place(socket.AF_INET, ("255.255.255.255", 1)))  # a broadcast, which needs a permission

    assert finding.status is Status.NOTE
    assert finding.found.startswith("no route to 255.255.255.255: ")


def test_sufficient_tcp_buffers_are_ok(tmp_path: Path) -> None:
    write_buffers(tmp_path, ipv4__tcp_rmem=f"4096 131072 {6 << 20}", ipv4__tcp_wmem=f"4096 16384 {4 << 20}")
    hidden = buffers(tmp_path)
    write_buffers(tmp_path, core__rmem_max="212992", core__wmem_max="212992")
    shown = buffers(tmp_path)

    assert hidden == Finding(Status.OK, "net.ipv4.tcp_rmem up to 6.0 MiB, net.ipv4.tcp_wmem up to 4.0 MiB")
    assert shown.found == f"{hidden.found}, net.core.rmem_max 208.0 KiB, net.core.wmem_max 208.0 KiB"
    assert shown.status is Status.OK


def test_smaller_buffers_are_a_note_with_the_setting_to_change(tmp_path: Path) -> None:
    write_buffers(
        tmp_path, ipv4__tcp_rmem=f"4096\t131072\t{6 << 20}", ipv4__tcp_wmem=f"4096\t16384\t{1 << 20}"
    )
    finding = buffers(tmp_path)

    assert finding.status is Status.NOTE
    assert "less than the 4.0 MiB that a sender keeps in transit" in finding.found
    assert advice_of(finding) == 'Raise the third value: sysctl -w net.ipv4.tcp_wmem="4096 16384 4194304"'


def test_buffers_that_cannot_be_read_are_a_note(tmp_path: Path) -> None:
    finding = buffers(tmp_path)

    assert finding.status is Status.NOTE
    assert "cannot be read" in finding.found
