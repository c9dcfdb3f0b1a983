"""Addresses and keys of servers, and options that are rejected before any connection is made."""

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from aiotensor import (
    AccessDeniedError,
    RefusedError,
    TensorSender,
    UsageError,
)
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, answer, channel, key_options, place
from tests.transports.unix_ends import NOBODY, in_child, needs_root, squatting
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_PATIENCE_S = 20.0  # for calls that would otherwise wait without end


def key_pair() -> tuple[bytes, bytes]:
    public, secret = zmq.curve_keypair()
    return public, secret


MALFORMED = [
    "",
    "unix:///tmp/s",
    "ipc://relative",
    "ipc://@abstract",
    "ipc:///tmp/",
    "ipc:///" + "x" * 200,
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
    "inproc://x",
    "http://127.0.0.1:80",
]


def test_a_malformed_address_is_rejected() -> None:
    public, secret = key_pair()
    for address in MALFORMED:
        with pytest.raises(ValueError, match="address"):
            MessageServer(address, Question, secret_key=secret, client_keys=[public])
        with pytest.raises(ValueError, match="address"):
            MessageClient(address, reply_type=Answer, secret_key=secret, server_key=public)


@pytest.mark.promise(25)
def test_addresses_of_other_machines_require_keys() -> None:
    public, secret = key_pair()
    for host in ("*", "0.0.0.0", "[::]", "192.168.1.7", "example.org", "eth0", "localhost.example"):  # noqa: S104
        address = f"tcp://{host}:5555"
        with pytest.raises(
            ValueError, match=r"could connect.*secret_key and client_keys.*zmq.curve_keypair.*ipc://"
        ):
            MessageServer(address, Question)
        MessageServer(address, Question, secret_key=secret, client_keys=[public])
        if host == "*":
            with pytest.raises(ValueError, match="does not specify a server to connect to"):
                MessageClient(address, reply_type=Answer)
        else:
            with pytest.raises(ValueError, match=r"could connect.*secret_key and server_key"):
                MessageClient(address, reply_type=Answer)
            MessageClient(address, reply_type=Answer, secret_key=secret, server_key=public.decode())
    for host in ("127.0.0.1", "127.3.2.1", "localhost", "[::1]"):
        MessageServer(f"tcp://{host}:5555", Question)
        MessageClient(f"tcp://{host}:5555", reply_type=Answer)


WRONG: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"high_water_mark": 0}, ValueError),
    ({"high_water_mark": 1.5}, TypeError),
    ({"max_part_bytes": 0}, ValueError),
    ({"max_body_bytes": 0}, ValueError),
    ({"max_body_bytes": 1.5}, TypeError),
    ({"heartbeat_interval_s": 0.0001}, ValueError),
    ({"heartbeat_interval_s": 0.0}, ValueError),
    ({"heartbeat_timeout_s": 0.0}, ValueError),
    ({"heartbeat_interval_s": 1.0, "heartbeat_timeout_s": -1.0}, ValueError),
    ({"linger_s": -1.0}, ValueError),
    ({"secret_key": "x"}, ValueError),
    ({"secret_key": "x" * 40}, ValueError),
    ({"secret_key": 5}, ValueError),
]
WRONG_FOR_CLIENTS: list[tuple[dict[str, Any], type[Exception]]] = [
    *[({"max_wait_s": wrong}, ValueError) for wrong in (0, -0.5, float("nan"))],
    *[({"grace_s": wrong}, ValueError) for wrong in (-1.0, float("nan"))],
    ({"max_wait_s": "soon"}, TypeError),
]
WRONG_FOR_SERVERS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({name: 0}, ValueError) for name in ("max_clients", "max_waiting", "max_waiting_bytes")
]


def test_limits_and_keys_are_checked_when_an_object_is_made() -> None:
    for wrong, error in WRONG + WRONG_FOR_SERVERS:
        with pytest.raises(error):
            MessageServer("ipc:///tmp/s", Question, **wrong)
    for wrong, error in WRONG + WRONG_FOR_CLIENTS:
        with pytest.raises(error):
            MessageClient("ipc:///tmp/s", reply_type=Answer, **wrong)


async def test_keys_must_be_given_in_pairs_and_errors_do_not_reveal_them() -> None:
    public, secret = key_pair()
    with pytest.raises(ValueError, match="secret_key and client_keys must be passed together"):
        MessageServer("ipc:///tmp/s", Question, client_keys=[public])
    with pytest.raises(ValueError, match="secret_key and server_key must be passed together"):
        MessageClient("ipc:///tmp/s", reply_type=Answer, server_key=public)
    slip = secret.decode()[:-1]
    with pytest.raises(ValueError, match="40 characters") as caught:
        MessageServer("ipc:///tmp/s", Question, secret_key=slip, client_keys=[public])
    assert slip not in str(caught.value)
    with pytest.raises(ValueError, match="40 characters"):
        MessageServer("ipc:///tmp/s", Question, secret_key="#" * 40, client_keys=[public])
    with pytest.raises(TypeError, match="client_keys"):
        MessageServer("ipc:///tmp/s", Question, secret_key=secret, client_keys=[5])  # type: ignore[list-item]
    one: Any
    for one in (public, public.decode(), b""):
        with pytest.raises(TypeError, match=r"a collection of public keys, such as \[key\], got one key"):
            MessageServer("ipc:///tmp/s", Question, secret_key=secret, client_keys=one)


def test_a_client_needs_one_sender_for_each_server_or_none() -> None:
    one, other = TensorSender("unix:///tmp/a"), TensorSender("unix:///tmp/b")
    two = ["ipc:///tmp/s", "ipc:///tmp/t"]
    MessageClient(two, sender=[one, other], reply_type=Answer)
    MessageClient(two, reply_type=Answer)
    for senders in (one, [one]):
        with pytest.raises(ValueError, match="one sender for each server"):
            MessageClient(two, sender=senders, reply_type=Answer)
    with pytest.raises(ValueError, match="one sender for each server"):
        MessageClient([], reply_type=Answer)
    engines = ["engine:///run/one", "engine:///run/two"]
    with pytest.raises(ValueError, match="engine:///run/one sends to engine:///run/two"):
        MessageClient(engines, sender=[TensorSender(one) for one in reversed(engines)], reply_type=int)


@pytest.mark.promise(2, 25)
async def test_the_socket_file_is_private_and_removed_on_close() -> None:
    with place() as here:
        path = here.messages.removeprefix("ipc://")
        async with MessageServer(here.messages, Question):
            mode = os.stat(path).st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
        assert os.listdir(os.path.dirname(path)) == []


@pytest.mark.promise(2)
async def test_the_socket_file_of_a_dead_server_is_replaced_but_not_of_a_live_one() -> None:
    with place() as here:
        path = here.messages.removeprefix("ipc://")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        async with MessageServer(here.messages, Question):
            with pytest.raises(UsageError, match="listens"):
                async with MessageServer(here.messages, Question):
                    pass
            async with MessageClient(here.messages, reply_type=Answer) as client:
                await until(lambda: client.statistics().servers == 1)


@pytest.fixture
def keys() -> dict[str, tuple[bytes, bytes]]:
    return {"server": key_pair(), "client": key_pair(), "stranger": key_pair()}


@pytest.mark.promise(37)
async def test_only_clients_with_the_right_keys_are_served(keys: dict[str, tuple[bytes, bytes]]) -> None:
    server_public, server_secret = keys["server"]
    client_public, client_secret = keys["client"]
    async with MessageServer(
        "tcp://127.0.0.1:0", Question, secret_key=server_secret, client_keys=[client_public]
    ) as server:
        right: dict[str, Any] = {"secret_key": client_secret, "server_key": server_public}
        async with MessageClient(server.address, reply_type=Answer, **right) as client:
            await client.send(Question(1))
            assert (await anext(server)).message.seed == 1

            wrong: list[dict[str, Any]] = [
                {"secret_key": keys["stranger"][1], "server_key": server_public},  # not in the list
                {"secret_key": client_secret, "server_key": keys["stranger"][0]},  # another server's
                {},
            ]
            for options in wrong:
                async with MessageClient(server.address, reply_type=Answer, **options) as stranger:
                    for _ in range(2):  # who asks again tries again
                        with pytest.raises(AccessDeniedError, match="keys"):
                            await stranger.request(Question(2))
            assert server.statistics().messages_received == 1
            await client.send(Question(3))
            assert (await anext(server)).message.seed == 3


async def test_a_client_does_not_connect_to_a_server_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with place() as here:
        async with MessageServer(here.messages, Question) as server:
            # There is one user here: the client takes itself for another.
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
            async with MessageClient(here.messages, reply_type=Answer) as client:
                with pytest.raises(AccessDeniedError, match="run both as the same user"):
                    await client.request(Question(1))
            assert server.statistics().clients == 0


@pytest.mark.promise(25)
@needs_root
@pytest.mark.parametrize("listens", [True, False], ids=["full", "silent"])
async def test_a_socket_file_of_another_user_raises_access_denied_error(listens: bool) -> None:
    with place() as here:
        path = Path(here.messages.removeprefix("ipc://"))
        async with (
            squatting(path, socket.SOCK_STREAM, listens=listens),
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            for _ in range(2):
                async with asyncio.timeout(_PATIENCE_S):
                    with pytest.raises(AccessDeniedError, match=f"the file belongs to user {NOBODY}"):
                        await client.request(Question(1))


@needs_root
@pytest.mark.parametrize(
    ("mode", "reason"), [(0o700, "may not connect"), (0o755, "belongs to user 0")], ids=["folder", "file"]
)
async def test_a_client_without_access_to_the_socket_file_gets_the_reason(mode: int, reason: str) -> None:
    with place() as here:
        async with MessageServer(here.messages, Question) as server:
            Path(here.messages.removeprefix("ipc://")).parent.chmod(mode)
            assert reason in await in_child(_ask_as_nobody, here.messages)
            assert server.statistics().clients == 0


def _ask_as_nobody(address: str) -> str:
    os.setuid(NOBODY)

    async def ask() -> str:
        async with MessageClient(address, reply_type=Answer) as client, asyncio.timeout(_PATIENCE_S):
            try:
                await client.request(Question(1))
            except AccessDeniedError as error:
                return str(error)
        return "answered"

    return asyncio.run(ask())


async def test_a_client_beyond_max_clients_is_refused() -> None:
    async with channel(server={"max_clients": 1}) as ends:
        await until(lambda: ends.server.statistics().clients == 1)
        async with MessageClient(ends.place.messages, reply_type=Answer) as other:
            for _ in range(2):
                with pytest.raises(RefusedError, match=r"refused this client.*max_clients=1"):
                    await other.request(Question(1))
            assert ends.server.statistics().clients_refused >= 2
            await ends.client.send(Question(2))
            assert (await anext(ends.server)).message.seed == 2
            await ends.client.aclose()
            await until(lambda: ends.server.statistics().clients == 0)
            await other.send(Question(3))
            assert (await anext(ends.server)).message.seed == 3


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


async def test_a_client_finds_a_moved_server_at_its_new_address(resolver: Resolver) -> None:
    of_server, of_client = key_options()
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


async def test_a_server_listens_at_the_local_address_of_its_name(resolver: Resolver) -> None:
    of_server, of_client = key_options()
    resolver.names["engine.example"] = ["192.0.2.1", "127.0.0.5"]  # the first is of another machine
    async with serving("tcp://engine.example:0", **of_server) as server:
        assert server.address == f"tcp://127.0.0.5:{port_of(server)}"
        async with MessageClient(server.address, reply_type=Answer, max_wait_s=10, **of_client) as client:
            assert (await client.request(Question(1))).seed == 1
        with pytest.raises(UsageError, match="another server already listens"):
            async with MessageServer(f"tcp://engine.example:{port_of(server)}", Question, **of_server):
                pass


async def test_a_server_name_that_leads_nowhere_here_raises_os_error_with_a_hint(resolver: Resolver) -> None:
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
            async with MessageServer("tcp://engine.example:5555", Question, **key_options()[0]):
                pass
        assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)


async def test_handshakes_that_the_server_ends_raise_access_denied_error() -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await reader.read()  # closing with unread data would reset the connection
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as impostor:
        address = f"tcp://127.0.0.1:{impostor.sockets[0].getsockname()[1]}"
        async with MessageClient(address, reply_type=Answer, max_wait_s=10, **key_options()[1]) as client:
            with pytest.raises(AccessDeniedError, match="the keys of this client and of the server"):
                await client.request(Question(1))
