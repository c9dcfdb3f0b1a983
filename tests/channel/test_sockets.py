"""What ZeroMQ does behind the loop's back does no harm: descriptors change hands, events wait to be read."""

import asyncio
import os
import socket

import pytest

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.channel.sockets import _place_of
from tests.channel.parties import Answer, Question, answer, place
from tests.pairs import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_the_place_of_a_socket_is_its_path_or_its_port() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        assert _place_of(other) == _place_of(listener) == listener.getsockname()[1]
        assert _place_of(one) != _place_of(listener)


async def test_a_connection_that_zeromq_has_closed_is_cut_without_an_error_and_nothing_else_is() -> None:
    with place() as here:
        async with MessageServer(here.messages, Question) as server:
            sock = server._clients.socket
            reader, writer = os.pipe()
            assert sock.cut(reader)  # the number is that of a pipe now
            os.fstat(reader)
            for descriptor in (reader, writer):
                os.close(descriptor)
            assert sock.cut(reader)


async def test_a_connection_whose_number_is_another_sockets_by_now_refuses_nobody() -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, Question) as server,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            serving = asyncio.create_task(server.serve(answer))
            with socket.create_server(("127.0.0.1", 0)) as another:
                client._connections[0].connected(another.fileno())
            assert (await client.request(Question(1))).seed == 1
            await server.aclose()
            await serving


async def test_a_server_that_was_too_busy_to_hear_of_its_connections_closes() -> None:
    with place() as here:
        async with MessageServer(here.messages, Question) as server:
            # The loop stands still: nobody reads what ZeroMQ has to say of each of these.
            for _ in range(1500):
                with socket.socket(socket.AF_UNIX) as one:
                    one.connect(here.messages.removeprefix("ipc://"))
            await server.aclose()


async def test_a_connection_is_cut_by_its_number_while_it_is_there() -> None:
    with place() as here:
        async with MessageServer(here.messages, Question) as server:
            clients = server._clients
            reader, writer = await asyncio.open_unix_connection(here.messages.removeprefix("ipc://"))
            await until(lambda: len(clients._accepted._identities) == 1)
            with socket.create_server(("127.0.0.1", 0)) as another:
                clients.socket.cut(another.fileno())  # as if it had the number now
                assert another.getsockname()
                another.settimeout(0)
                with pytest.raises(BlockingIOError):  # it listens still
                    another.accept()
            assert len(clients._accepted._identities) == 1
            clients.socket.cut(next(iter(clients._accepted._identities)))
            while await reader.read(100):
                pass
            await until(lambda: not clients._accepted._identities)
            writer.close()
