"""How a client finds its server: names, several addresses, and handshakes that fail."""

import asyncio
import errno
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import pytest
import zmq

from aiotensor import AccessDeniedError, ClosedError, UsageError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer, remote_server
from aiotensor.protocol.exchange import VERSION, ServerHello, write
from aiotensor.transports.zeromq import dialing, listener
from tests.channel.parties import Answer, Question, answer, place, said
from tests.channel.rogues import hear, raw
from verification.promptly import promptly
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


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_localhost_leads_to_a_server_at_either_loopback_address(host: str, resolver: Resolver) -> None:
    async with (
        serving(f"tcp://{host}:0") as server,
        MessageClient(f"tcp://localhost:{port_of(server)}", reply_type=Answer, max_wait_s=10) as client,
    ):
        assert (await client.request(Question(1))).seed == 1
    assert resolver.asked == []  # a resolver may know another machine by this name


async def test_a_server_at_localhost_listens_on_the_loopback_alone() -> None:
    async with serving("tcp://localhost:0") as server:
        assert server.address == f"tcp://127.0.0.1:{port_of(server)}"
        with pytest.raises(UsageError, match="another server already listens"):
            async with MessageServer(f"tcp://localhost:{port_of(server)}", Question):
                pass


async def test_all_addresses_of_a_name_are_tried_until_one_leads_to_the_server(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    of_server, of_client = keys
    resolver.names["engine.example"] = ["127.0.0.5", "::1", "127.0.0.7"]
    async with serving("tcp://127.0.0.7:0", **of_server) as server:
        address = f"tcp://engine.example:{port_of(server)}"
        async with MessageClient(address, reply_type=Answer, max_wait_s=10, **of_client) as client:
            assert (await client.request(Question(1))).seed == 1


async def test_a_client_finds_a_moved_server_at_its_new_address(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    of_server, of_client = keys
    resolver.names["engine.example"] = ["127.0.0.5"]
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


async def test_a_hanging_lookup_does_not_delay_other_servers(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    of_server, of_client = keys
    resolver.silent |= {f"silent-{number}.example" for number in range(50)}  # more than any pool has threads
    resolver.names["engine.example"] = ["127.0.0.5"]
    async with serving("tcp://127.0.0.5:0", **of_server) as server:
        port = port_of(server)
        addresses = [f"tcp://{name}:{port}" for name in (*sorted(resolver.silent), "engine.example")]
        with promptly():
            async with MessageClient(addresses, reply_type=Answer, linger_s=0, **of_client) as client:
                assert (await client.request(Question(1))).seed == 1
                assert (await client.request(Question(2), target=50)).seed == 2
        resolver.ends.set()


async def test_a_hanging_lookup_is_logged_once_and_its_result_is_used(
    resolver: Resolver, keys: tuple[Keys, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_server, of_client = keys
    monkeypatch.setattr(dialing, "_LOOKUP_SLOW_S", 0.02)
    resolver.silent.add("engine.example")
    async with serving("tcp://127.0.0.5:0", **of_server) as server:
        address = f"tcp://engine.example:{port_of(server)}"
        with said() as texts:
            async with MessageClient(address, reply_type=Answer, max_wait_s=0.3, **of_client) as client:
                with pytest.raises(WouldBlockError, match=r"its name cannot be resolved: no name server ans"):
                    await client.request(Question(1))
                assert resolver.asked == ["engine.example"]
                assert texts == [
                    f"the name of the server at {address} cannot be resolved: no name server answers"
                ]
                resolver.names["engine.example"] = ["127.0.0.5"]
                resolver.ends.set()
                await until(lambda: client.statistics().servers == 1)
                assert (await client.request(Question(2))).seed == 2


async def test_an_unknown_name_is_looked_up_again_and_logged_once(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    of_server, of_client = keys
    async with serving("tcp://127.0.0.5:0", **of_server) as server:
        address = f"tcp://engine.example:{port_of(server)}"
        with said() as texts:
            async with MessageClient(address, reply_type=Answer, max_wait_s=10, **of_client) as client:
                asking = asyncio.create_task(client.request(Question(1)))
                await until(lambda: len(resolver.asked) > 3)
                resolver.names["engine.example"] = ["127.0.0.5"]
                assert (await asking).seed == 1
        assert [text for text in texts if "resolved" in text] == [
            f"the name of the server at {address} cannot be resolved: Name or service not known"
        ]


async def test_a_name_is_resolved_later_if_no_thread_can_be_started(
    resolver: Resolver, keys: tuple[Keys, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_server, of_client = keys
    resolver.names["engine.example"] = ["127.0.0.5"]

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with serving("tcp://127.0.0.5:0", **of_server) as server:
        client = MessageClient(
            f"tcp://engine.example:{port_of(server)}", reply_type=Answer, max_wait_s=10, **of_client
        )
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with said() as texts:
                await client.__aenter__()
        assert len(texts) == 1
        assert "no thread can be started" in texts[0]
        assert (await client.request(Question(1))).seed == 1
        await client.aclose()


async def test_closing_a_client_during_name_resolution_ignores_the_result(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    resolver.silent.add("engine.example")
    resolver.names["engine.example"] = ["127.0.0.5"]
    with promptly():
        async with MessageClient("tcp://engine.example:5555", reply_type=Answer, linger_s=0, **keys[1]):
            await until(lambda: len(resolver.asked) == 1)
    resolver.ends.set()
    await until(lambda: not any(thread.name == "aiotensor-resolving" for thread in threading.enumerate()))
    await asyncio.sleep(0)


def test_a_process_ends_while_a_name_is_being_resolved() -> None:
    code = """
import asyncio, socket, threading, zmq
from aiotensor.channel import MessageClient
begun = threading.Event()
def stuck(*arguments, **options):
    begun.set()
    threading.Event().wait()
socket.getaddrinfo = stuck
async def main():
    public, secret = zmq.curve_keypair()
    keys = {"secret_key": secret, "server_key": public}
    async with MessageClient("tcp://engine.example:5555", reply_type=int, linger_s=0, **keys):
        while not begun.is_set():
            await asyncio.sleep(0.01)
asyncio.run(main())
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Names of servers


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


async def test_a_server_that_is_closed_while_its_name_is_resolved_does_not_open(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    resolver.silent.add("engine.example")
    resolver.names["engine.example"] = ["127.0.0.5"]
    server = MessageServer("tcp://engine.example:0", Question, **keys[0])
    opening = asyncio.create_task(server.__aenter__())
    await until(lambda: len(resolver.asked) == 1)
    with pytest.raises(UsageError, match="is being opened"):
        await anext(server)
    await server.aclose()
    resolver.ends.set()
    with pytest.raises(ClosedError, match="was closed"):
        await opening


async def test_a_server_listens_at_the_address_of_an_interface(keys: tuple[Keys, Keys]) -> None:
    of_server, of_client = keys
    async with (
        serving("tcp://lo:0", **of_server) as server,
        MessageClient(server.address, reply_type=Answer, max_wait_s=10, **of_client) as client,
    ):
        assert server.address.startswith("tcp://127.0.0.1:")
        assert (await client.request(Question(1))).seed == 1


async def test_a_server_name_of_another_machine_raises_os_error_with_a_hint(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    resolver.names["engine.example"] = ["192.0.2.1"]
    with pytest.raises(OSError, match=r"does not have the address tcp://192\.0\.2\.1:5555: use") as caught:
        async with MessageServer("tcp://engine.example:5555", Question, **keys[0]):
            pass
    assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)


async def test_an_unresolvable_server_name_raises_os_error_with_a_hint(
    resolver: Resolver, keys: tuple[Keys, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = r"the name engine\.example cannot be resolved \({}\); use an address .* tcp://\*:5555"
    with pytest.raises(OSError, match=why.format("Name or service not known")) as caught:
        async with MessageServer("tcp://engine.example:5555", Question, **keys[0]):
            pass
    assert caught.value.errno == errno.EADDRNOTAVAIL
    resolver.silent.add("engine.example")
    monkeypatch.setattr(listener, "_LOOKUP_S", 0.05)
    with pytest.raises(OSError, match=why.format(r"no name server answered for 0\.05 s")):
        async with MessageServer("tcp://engine.example:5555", Question, **keys[0]):
            pass


async def test_opening_a_server_can_be_cancelled_while_its_name_is_resolved(
    resolver: Resolver, keys: tuple[Keys, Keys]
) -> None:
    resolver.silent.add("engine.example")
    server = MessageServer("tcp://engine.example:5555", Question, **keys[0])
    opening = asyncio.create_task(server.__aenter__())
    await until(lambda: len(resolver.asked) == 1)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


@pytest.mark.parametrize("host", ["localhost.example", "localhost.localdomain", "ip6-localhost", "engine"])
async def test_host_names_other_than_localhost_require_keys(host: str) -> None:
    with pytest.raises(ValueError, match="could connect"):
        MessageServer(f"tcp://{host}:5555", Question)
    with pytest.raises(ValueError, match="could connect"):
        MessageClient(f"tcp://{host}:5555", reply_type=Answer)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "en gine", "engine\0", "en;gine", "[::g]"])
async def test_an_invalid_host_name_is_rejected(host: str, keys: tuple[Keys, Keys]) -> None:
    with pytest.raises(ValueError, match="address"):
        MessageClient(f"tcp://{host}:5555", reply_type=Answer, **keys[1])


# Handshakes


@contextmanager
def impostor(treat: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[socket.socket]]]:
    """Accept connections and say nothing; yield the address, and all connections so far.

    Args:
        treat: called with each connection.
    """
    loop = asyncio.get_running_loop()
    accepted: list[socket.socket] = []

    def accept() -> None:
        accepted.append(accepting.accept()[0])
        treat(accepted[-1])

    with socket.create_server(("127.0.0.1", 0)) as accepting:
        loop.add_reader(accepting.fileno(), accept)
        try:
            yield f"tcp://127.0.0.1:{accepting.getsockname()[1]}", accepted
        finally:
            loop.remove_reader(accepting.fileno())
            for sock in accepted:
                sock.close()


def close(sock: socket.socket) -> None:
    """End a connection as a process does that has read everything."""
    sock.shutdown(socket.SHUT_WR)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def leave(sock: socket.socket) -> None:
    """Leave a connection as it is, as a server does that was stopped."""


async def test_a_hanging_handshake_is_repeated_within_seconds() -> None:
    with impostor(leave) as (address, accepted):
        async with MessageClient(address, reply_type=Answer, linger_s=0):
            with promptly(4):
                await until(lambda: len(accepted) == 2)


async def test_three_closed_handshakes_in_a_row_raise_access_denied_error(keys: tuple[Keys, Keys]) -> None:
    with impostor(close) as (address, accepted):
        async with MessageClient(address, reply_type=Answer, max_wait_s=10, **keys[1]) as client:
            with pytest.raises(AccessDeniedError, match="the keys of this client and of the server"):
                await client.request(Question(1))
        assert len(accepted) >= 3  # more if the loop is late, and a descriptor is already reused


async def test_reset_handshakes_do_not_raise_access_denied_error(keys: tuple[Keys, Keys]) -> None:
    def treat(sock: socket.socket) -> None:
        # Never three in a row, but more than that.
        (reset if len(accepted) % 3 == 0 else close)(sock)

    with impostor(treat) as (address, accepted):
        async with MessageClient(address, reply_type=Answer, linger_s=0, **keys[1]) as client:
            asking = asyncio.create_task(client.request(Question(1)))
            await until(lambda: len(accepted) >= 10)
            assert not asking.done()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking


async def test_timed_out_handshakes_do_not_raise_access_denied_error(
    keys: tuple[Keys, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {**dialing.DIALING_OPTIONS, zmq.HANDSHAKE_IVL: 100}
    monkeypatch.setattr(remote_server, "DIALING_OPTIONS", quick)
    # After a clean close, ZeroMQ's thread keeps that as its last error, and reports it for a timeout too.
    with impostor(leave) as (silent, accepted), impostor(close) as (other, ended):
        async with MessageClient([silent, other], reply_type=Answer, linger_s=0, **keys[1]) as client:
            asking = asyncio.create_task(client.request(Question(1), target=0))
            await until(lambda: len(accepted) >= 6 and len(ended) >= 3)
            assert not asking.done()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking


async def test_a_message_for_a_lost_server_is_not_sent_to_its_successor() -> None:
    with place() as here, zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as other:
        other.linger = 0
        other.reconnect_ivl = 300  # ms; ZeroMQ itself would wait for 100
        async with MessageClient(here.messages, reply_type=Answer) as client:
            async with raw(zmq.ROUTER, here.messages, binds=True) as first:
                identity, _ = await hear(first)
                await first.send_multipart([identity, write(ServerHello(VERSION, 1))])
                await until(lambda: client.statistics().servers == 1)
                other.connect(here.messages)
                other.send(b"for the first server")
                await first.recv_multipart()
            # The client's loop stands still from here on: it does not know yet that this server is gone.
            with pytest.raises(StopIteration):
                client.send(Question(1)).send(None)  # which waits for nothing
            assert client.statistics().messages_sent == 1
            other.send(b"for any server")
            with context.socket(zmq.ROUTER) as second:
                second.linger = 0
                second.bind(here.messages)
                _, message = second.recv_multipart()
                assert message == b"for any server"  # and the client's would have come before it
                assert second.poll(0) == 0
