"""Addresses with a host and a port: names, keys, and the processes that are found there."""

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
import zmq

from aiotensor import AccessDeniedError, PeerLostError, TensorReceiver, TensorSender, UsageError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.runtime import outage
from verification.patterns import pattern
from verification.places import free_port
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Options = dict[str, Any]

LISTENING: dict[str, Callable[..., object]] = {
    "receiver": TensorReceiver,
    "publisher": Publisher,
    "server": lambda address, **options: MessageServer(address, int, **options),
}
CONNECTING: dict[str, Callable[..., object]] = {
    "sender": TensorSender,
    "subscriber": Subscriber,
    "client": lambda address, **options: MessageClient(address, int, **options),
}


def new_keys() -> tuple[Options, Options]:
    """Return the options of a side that listens, and of one that connects."""
    (public, secret), (other_public, other_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    return (
        {"secret_key": secret, "client_keys": [other_public]},
        {"secret_key": other_secret, "server_key": public},
    )


# Arguments


@pytest.mark.parametrize("role", [*LISTENING, *CONNECTING])
def test_invalid_arguments_raise_errors_that_suggest_a_remedy(role: str) -> None:
    make = {**LISTENING, **CONNECTING}[role]
    ours = new_keys()[role in CONNECTING]
    with pytest.raises(ValueError, match=r"can only be used with tcp:// addresses"):
        make("unix:///tmp/s", peer_timeout_s=1.0)
    with pytest.raises(ValueError, match=r"peer_timeout_s must be between 0\.1 and 3600"):
        make("tcp://127.0.0.1:5000", peer_timeout_s=0.0)
    with pytest.raises(
        ValueError, match=r"must be unix:// followed by an absolute path, such as .* or tcp://"
    ):
        make("tcp:/127.0.0.1:5000")
    with pytest.raises(ValueError, match="must be passed together"):
        make("tcp://127.0.0.1:5000", secret_key=ours["secret_key"])
    make("tcp://127.0.0.1:5000", **ours)
    for name in ours:
        slip = ours[name][:5] if isinstance(ours[name], bytes) else [ours[name][0][:5]]
        with pytest.raises(ValueError, match="40 characters") as caught:
            make("tcp://127.0.0.1:5000", **{**ours, name: slip})
        assert str(slip) not in str(caught.value)  # it may be a secret with a typo
        wrong: Any = 5 if isinstance(ours[name], bytes) else [5]
        with pytest.raises(TypeError, match="40 characters"):
            make("tcp://127.0.0.1:5000", **{**ours, name: wrong})
    with pytest.raises(ValueError, match="40 characters"):
        make("tcp://127.0.0.1:5000", **{**ours, "secret_key": "#" * 40})
    if role in LISTENING:
        with pytest.raises(TypeError, match=r"such as \[key\], got one key"):
            make("tcp://127.0.0.1:5000", **{**ours, "client_keys": ours["client_keys"][0]})


@pytest.mark.parametrize(
    "address",
    [
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:5555/path",
        "tcp://a..b:5555",
        f"tcp://{'x' * 64}:5555",
        "tcp://en gine:5555",
        "tcp://engine\0:5555",
        "tcp://en;gine:5555",
        "tcp://[::g]:5555",
        "TCP://127.0.0.1:5555",
    ],
)
def test_a_malformed_address_is_rejected(address: str) -> None:
    for_listening, for_connecting = new_keys()
    with pytest.raises(ValueError, match="address"):
        TensorReceiver(address, **for_listening)
    with pytest.raises(ValueError, match="address"):
        TensorSender(address, **for_connecting)


@pytest.mark.promise(25, 37)
def test_addresses_that_other_machines_reach_require_keys() -> None:
    for_listening, for_connecting = new_keys()
    for host in ("*", "0.0.0.0", "[::]", "192.168.1.7", "example.org", "localhost.example"):  # noqa: S104
        address = f"tcp://{host}:5555"
        with pytest.raises(
            ValueError, match=r"could connect.*secret_key and client_keys.*use unix:// or the"
        ):
            TensorReceiver(address)
        TensorReceiver(address, **for_listening)
        if host == "*":
            with pytest.raises(ValueError, match="does not specify a server to connect to"):
                TensorSender(address, **for_connecting)
        else:
            with pytest.raises(ValueError, match=r"could connect.*secret_key and server_key"):
                TensorSender(address)
            TensorSender(address, **for_connecting)
    for host in ("127.0.0.1", "127.3.2.1", "localhost", "[::1]"):
        TensorReceiver(f"tcp://{host}:5555")
        TensorSender(f"tcp://{host}:5555")
    for make in (TensorReceiver, TensorSender):
        with pytest.raises(ValueError, match=r"does not contain a port|does not specify a server"):
            make("tcp://127.0.0.1:0")


# Keys


@pytest.mark.promise(37)
async def test_only_senders_with_the_right_keys_are_served() -> None:
    address, (for_listening, right) = f"tcp://127.0.0.1:{free_port()}", new_keys()
    strangers = new_keys()[1]
    async with TensorReceiver(address, **for_listening) as receiver, TensorSender(address, **right) as sender:
        await sender.ready()
        for wrong in (
            {**right, "secret_key": strangers["secret_key"]},  # not in the list
            {**right, "server_key": strangers["server_key"]},  # that of another process
            {},
        ):
            async with TensorSender(address, **wrong) as stranger:
                for _ in range(2):  # who tries again connects again
                    with pytest.raises(
                        AccessDeniedError, match="add this side's public key to its client_keys"
                    ):
                        await stranger.ready()
        seen = receiver.statistics()  # no frame of the others was decoded
        assert (seen.senders, seen.senders_refused, seen.senders_lost) == (1, 0, 0)
        assert (await receiver.receive(await sender.send(torch.arange(3)))).tolist() == [0, 1, 2]


async def test_handshakes_that_the_peer_ends_raise_access_denied_error() -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await reader.read()  # closing with unread data would reset the connection
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as impostor:
        address = f"tcp://127.0.0.1:{impostor.sockets[0].getsockname()[1]}"
        async with TensorSender(address, **new_keys()[1], max_wait_s=10) as sender:
            with pytest.raises(AccessDeniedError, match="the keys of this process and of the one at"):
                await sender.ready()


async def test_a_sender_with_a_key_reaches_the_next_receiver_of_the_same_process() -> None:
    address, (for_listening, for_connecting) = f"tcp://127.0.0.1:{free_port()}", new_keys()
    async with TensorSender(address, **for_connecting, max_wait_s=10) as sender:
        for number in range(5):
            async with TensorReceiver(address, **for_listening) as receiver:
                try:
                    handle = await sender.send(torch.full((3,), number))
                except PeerLostError:  # only now it is notified that the receiver before has closed
                    handle = await sender.send(torch.full((3,), number))
                assert (await receiver.receive(handle)).tolist() == [number] * 3


# Names


class Resolver:
    """Stand for the system's resolver."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []

    def getaddrinfo(self, host: str, port: int, **options: object) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (number, port, 0, 0))
            if ":" in number
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port))
            for number in self.names[host]
        ]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    return made


async def test_localhost_leads_to_a_receiver_at_either_loopback_address(resolver: Resolver) -> None:
    for host in ("127.0.0.1", "[::1]"):
        port = free_port()
        async with (
            TensorReceiver(f"tcp://{host}:{port}") as receiver,
            TensorSender(f"tcp://localhost:{port}", max_wait_s=10) as sender,
        ):
            assert (await receiver.receive(await sender.send(torch.arange(3)))).tolist() == [0, 1, 2]
    assert resolver.asked == []  # a resolver may know another machine by this name


async def test_a_sender_finds_a_moved_receiver_at_its_new_address(
    resolver: Resolver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_FIRST_LINE_S", 0.01)
    for_listening, for_connecting = new_keys()
    port = free_port()
    async with AsyncExitStack() as stack:
        sender = TensorSender(f"tcp://engine.example:{port}", max_wait_s=10, **for_connecting)
        await stack.enter_async_context(sender)
        await until(lambda: len(resolver.asked) > 2 and bool(caplog.records))
        assert caplog.text.count("its name cannot be resolved: Name or service not known") == 1
        resolver.names["engine.example"] = [
            "127.0.0.6",
            "::1",
            "127.0.0.5",
        ]  # nobody listens at the first two
        async with TensorReceiver(f"tcp://127.0.0.5:{port}", **for_listening) as receiver:
            await receiver.receive(await sender.send(pattern(1, 3)))
        await until(lambda: sender.receiver_id is None)
        resolver.names["engine.example"] = ["127.0.0.7"]
        async with TensorReceiver(f"tcp://127.0.0.7:{port}", **for_listening) as receiver:
            await receiver.receive(await sender.send(pattern(2, 3)))


async def test_a_receiver_listens_at_the_local_address_of_its_name(resolver: Resolver) -> None:
    for_listening, for_connecting = new_keys()
    port = free_port()
    resolver.names["engine.example"] = ["192.0.2.1", "127.0.0.5"]  # the first is of another machine
    async with TensorReceiver(f"tcp://engine.example:{port}", **for_listening):
        async with TensorSender(f"tcp://127.0.0.5:{port}", max_wait_s=10, **for_connecting) as sender:
            await sender.ready()
        with pytest.raises(UsageError, match="already listens"):
            async with TensorReceiver(f"tcp://engine.example:{port}", **for_listening):
                pass


@pytest.mark.parametrize(
    ("hosts", "hint"),
    [
        (
            [],
            r"engine\.example cannot be resolved \(Name or service not known\); use an address .* tcp://\*:5555",
        ),
        (["192.0.2.1"], r"cannot listen at tcp://192\.0\.2\.1:5555: "),
    ],
)
async def test_a_name_that_leads_nowhere_here_raises_os_error_with_a_hint(
    resolver: Resolver, hosts: list[str], hint: str
) -> None:
    if hosts:
        resolver.names["engine.example"] = hosts
    with pytest.raises(OSError, match=hint) as caught:
        async with TensorReceiver("tcp://engine.example:5555", **new_keys()[0]):
            pass
    assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)
