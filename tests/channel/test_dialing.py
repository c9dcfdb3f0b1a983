"""How a client finds its server by a name, and a server its own address."""

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

import pytest
import zmq

from aiotensor import AccessDeniedError, UsageError
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, answer
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Keys: TypeAlias = dict[str, Any]


@pytest.fixture
def keys() -> tuple[Keys, Keys]:
    """Keys of a server, and of a client that it knows."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    of_server = {"secret_key": server_secret, "client_keys": [client_public]}
    return of_server, {"secret_key": client_secret, "server_key": server_public}


class Resolver:
    """Stand for the system's resolver: knows names, and leaves some without an answer until the end."""

    def __init__(self, names: dict[str, list[str]], silent: set[str]) -> None:
        self.names = names
        self.silent = silent
        self.asked: list[str] = []
        self.ends = threading.Event()

    def getaddrinfo(self, host: str, port: int, **options: object) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host in self.silent:
            self.ends.wait()
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (number, port, 0, 0))
            if ":" in number
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port))
            for number in self.names[host]
        ]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver({}, set())
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    yield made
    made.ends.set()


@asynccontextmanager
async def serving(address: str, **options: Any) -> AsyncIterator[MessageServer[Question]]:
    """Open a server, and have it answer."""
    async with MessageServer(address, Question, **options) as server:
        task = asyncio.create_task(server.serve(answer))
        yield server
        await server.aclose()
        await task


def port_of(server: MessageServer[Question]) -> int:
    return int(server.address.rpartition(":")[2])


async def test_localhost_leads_to_a_server_at_either_loopback_address(resolver: Resolver) -> None:
    for host in ("127.0.0.1", "[::1]"):
        async with (
            serving(f"tcp://{host}:0") as server,
            MessageClient(f"tcp://localhost:{port_of(server)}", reply_type=Answer, max_wait_s=10) as client,
        ):
            assert (await client.request(Question(1))).seed == 1
    assert resolver.asked == []  # a resolver may know another machine by this name


async def test_a_client_finds_a_moved_server_at_its_new_address(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    of_server, of_client = keys
    resolver.names["engine.example"] = ["127.0.0.6", "::1", "127.0.0.5"]  # nobody listens at the first two
    async with AsyncExitStack() as stack:
        async with serving("tcp://127.0.0.5:0", **of_server) as server:
            port = port_of(server)
            client = await stack.enter_async_context(
                MessageClient(f"tcp://engine.example:{port}", reply_type=Answer, max_wait_s=10, **of_client)
            )
            assert (await client.request(Question(1))).seed == 1
        await until(lambda: client.statistics().servers == 0)  # or the request would be lost with it
        resolver.names["engine.example"] = ["127.0.0.7"]
        async with serving(f"tcp://127.0.0.7:{port}", **of_server):
            assert (await client.request(Question(2))).seed == 2


async def test_a_server_listens_at_the_local_address_of_its_name(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    of_server, of_client = keys
    resolver.names["engine.example"] = ["192.0.2.1", "127.0.0.5"]  # the first is of another machine
    async with serving("tcp://engine.example:0", **of_server) as server:
        assert server.address == f"tcp://127.0.0.5:{port_of(server)}"
        async with MessageClient(server.address, reply_type=Answer, max_wait_s=10, **of_client) as client:
            assert (await client.request(Question(1))).seed == 1
        with pytest.raises(UsageError, match="another server already listens"):
            async with MessageServer(f"tcp://engine.example:{port_of(server)}", Question, **of_server):
                pass


async def test_a_server_name_that_leads_nowhere_here_raises_os_error_with_a_hint(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    for addresses, hint in (
        (
            [],
            r"engine\.example cannot be resolved \(Name or service not known\); use an address .* tcp://\*:5555",
        ),
        (["192.0.2.1"], r"does not have the address tcp://192\.0\.2\.1:5555: use"),
    ):
        if addresses:
            resolver.names["engine.example"] = addresses
        with pytest.raises(OSError, match=hint) as caught:
            async with MessageServer("tcp://engine.example:5555", Question, **keys[0]):
                pass
        assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)


async def test_handshakes_that_the_server_ends_raise_access_denied_error(keys: tuple[Keys, Keys]) -> None:
    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as impostor:
        address = f"tcp://127.0.0.1:{impostor.sockets[0].getsockname()[1]}"
        async with MessageClient(address, reply_type=Answer, max_wait_s=10, **keys[1]) as client:
            with pytest.raises(AccessDeniedError, match="the keys of this client and of the server"):
                await client.request(Question(1))
