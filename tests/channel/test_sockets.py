"""Activity of ZeroMQ's threads does no harm: descriptors are reused, and events wait to be read."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.transports.zeromq.context import ZmqContext
from aiotensor.transports.zeromq.sockets import LoopSocket
from tests.channel.parties import Answer, Question, answer, place
from verification import inside
from verification.descriptors import our_descriptors
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Told:
    """Record the connections that a socket reports to its owner, by their descriptors, and nothing else."""

    def __init__(self) -> None:
        self.connections: list[int] = []
        self.reported = 0  # the number of connections, including ended ones

    def connected(self, descriptor: int) -> None:
        self.connections.append(descriptor)
        self.reported += 1

    def disconnected(self, descriptor: int) -> None:
        self.connections.remove(descriptor)

    def message_arrived(self, parts: object) -> None:
        raise AssertionError(f"nobody said {parts}")

    def refused(self, *, is_final: bool, error: int) -> None:
        assert not is_final, error

    def handshaken(self) -> None: ...

    def unreachable(self) -> None: ...

    def writable(self) -> None: ...


@contextmanager
def listening(address: str) -> Iterator[tuple[LoopSocket, Told]]:
    """Open a listening socket like that of a server, without the server."""
    told = Told()
    with ZmqContext() as context:
        sock = LoopSocket(context, zmq.ROUTER, {}, told)
        sock.bind(address)
        try:
            yield sock, told
        finally:
            sock.close()


async def test_resetting_a_connection_that_zeromq_closed_has_no_effect() -> None:
    with place() as here, listening(here.messages) as (sock, _):
        reader, writer = os.pipe()
        assert sock.monitor.reset(reader)  # the number is that of a pipe now
        os.fstat(reader)
        for descriptor in (reader, writer):
            os.close(descriptor)
        assert sock.monitor.reset(reader)


async def test_a_descriptor_reused_by_another_socket_causes_no_refusal() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            serving = asyncio.create_task(server.serve(answer))
            with socket.create_server(("127.0.0.1", 0)) as another:
                inside.servers_of(client)[0].connected(another.fileno())
            assert (await client.request(Question(1))).seed == 1
            await server.aclose()
            await serving


async def test_a_server_closes_despite_many_unread_connection_events() -> None:
    with place() as here:
        async with MessageServer(here.messages, Question) as server:
            # The loop is blocked: it reads none of the events that ZeroMQ reports for these connections.
            for _ in range(1500):
                with socket.socket(socket.AF_UNIX) as one:
                    one.connect(here.messages.removeprefix("ipc://"))
            await server.aclose()


@pytest.mark.parametrize("address", ["ipc://", "tcp://127.0.0.1:0", "tcp://*:0"])
async def test_reset_closes_an_open_connection_and_no_other_socket(address: str) -> None:
    with place() as here, listening(here.messages if address == "ipc://" else address) as (sock, told):
        reader, writer = await connected(sock.address)
        await until(lambda: len(told.connections) == 1)
        with (
            socket.create_server(("127.0.0.1", 0)) as another,
            socket.create_connection(another.getsockname()) as one,
            another.accept()[0] as accepted,
        ):
            for elsewhere in (another, one, accepted):  # as if it had the number now
                assert sock.monitor.reset(elsewhere.fileno())
            accepted.sendall(b"still here")
            assert one.recv(100) == b"still here"
            socket.create_connection(another.getsockname()).close()
            another.accept()[0].close()
        assert sock.monitor.reset(told.connections[0])
        with suppress(ConnectionResetError):
            while await reader.read(100):  # ZeroMQ greets at once
                pass
        await until(lambda: not told.connections)
        writer.close()


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect without ZeroMQ."""
    scheme, _, where = address.partition("://")
    if scheme == "ipc":
        return await asyncio.open_unix_connection(where)
    return await asyncio.open_connection("127.0.0.1", int(where.rpartition(":")[2]))


def greeted(address: str) -> socket.socket:
    """Connect without the event loop, and wait until ZeroMQ has accepted the connection."""
    one = socket.socket(socket.AF_UNIX)
    one.connect(address.removeprefix("ipc://"))
    assert one.recv(1)
    return one


async def test_a_connection_that_ends_before_the_loop_handles_it_is_not_reported() -> None:
    with place() as here, listening(here.messages) as (_, told):
        await asyncio.sleep(0)  # the socket listens
        before = our_descriptors()
        # The loop is blocked until ZeroMQ has closed its ends of the connections.
        for _ in range(100):
            greeted(here.messages).close()
        ends_s = time.monotonic() + 60
        while our_descriptors() != before:
            assert time.monotonic() < ends_s
        with greeted(here.messages):
            await until(lambda: bool(told.connections))
            assert told.reported == 1
        await until(lambda: not told.connections)


async def test_after_events_waits_for_earlier_events_only() -> None:
    with place() as here, listening(here.messages) as (sock, told), ExitStack() as opened:
        reported = asyncio.get_running_loop().create_future()
        for _ in range(200):
            opened.enter_context(greeted(here.messages))
        sock.monitor.after_events(lambda: reported.set_result(told.reported))
        assert not reported.done()  # an iteration does not handle that many events
        for _ in range(100):
            opened.enter_context(greeted(here.messages))
        assert await reported == 200
        await until(lambda: told.reported == 300)
        opened.close()
        await until(lambda: not told.connections)
