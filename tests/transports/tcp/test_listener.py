"""Connections of a listener, as ZeroMQ reports them.

ZeroMQ may deliver the last message of a connection after the first one of the next connection with the same
descriptor. So these tests choose the descriptors, which are not open, and the order of events and messages.
"""

import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq

from aiotensor.protocol.network import OPENING
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.tcp.listener import TcpListener, listen_at
from aiotensor.transports.tcp.sockets import ACCEPTED, DISCONNECTED, options_of
from tests.transports.ends import turns
from tests.transports.parties import Accepting
from verification.places import free_port
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

FIRST = 5000  # a descriptor that is not open
OTHERS = range(FIRST + 1, FIRST + 101)


class Part:
    """A part of a message, with the descriptor on which it arrived."""

    def __init__(self, content: bytes, descriptor: int) -> None:
        self.bytes = content
        self.buffer = memoryview(content)
        self._descriptor = descriptor

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD
        return self._descriptor


def message(identity: bytes, descriptor: int, content: bytes = OPENING) -> list[Any]:
    return [Part(identity, descriptor), Part(content, descriptor)]


@pytest.fixture
async def accepting() -> Accepting:
    return Accepting()


@pytest.fixture
async def listener(accepting: Accepting) -> AsyncIterator[TcpListener]:
    address = f"tcp://127.0.0.1:{free_port()}"
    listener = await listen_at(
        options_of(address, TcpArguments(connects=False)), accepting.connection_accepted
    )
    yield listener
    listener.close()
    accepting.close()


async def test_a_late_message_of_an_ended_connection_leaves_the_next_one_its_descriptor(
    listener: TcpListener,
    accepting: Accepting,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "send", lambda *_: True)
    listener.event(ACCEPTED, FIRST)
    listener.message_arrived(message(b"peer", FIRST))
    listener.message_arrived(message(b"late", FIRST, b"something"))
    await turns()
    [end] = accepting.ends
    for descriptor in OTHERS:
        listener.event(ACCEPTED, descriptor)
    listener.accept_now()  # closes the oldest of the others, and not the peer
    await turns()
    assert end.lost == []
    listener.event(DISCONNECTED, FIRST)
    await end.was_lost.wait()
    assert end.lost == ["the peer closed the connection"]
    listener.close()  # logs the refusals that were only counted
    assert f"(the latest of {len(OTHERS) - 64} since the last such line)" in caplog.text


async def test_a_message_of_a_connection_that_has_ended_is_ignored(
    listener: TcpListener, accepting: Accepting
) -> None:
    listener.event(ACCEPTED, FIRST)
    listener.event(DISCONNECTED, FIRST)
    listener.message_arrived(message(b"late", FIRST))
    await turns()
    assert accepting.ends == []


async def test_the_oldest_silent_connections_are_reset_in_favour_of_the_next_ones(
    listener: TcpListener,
) -> None:
    place = "127.0.0.1", int(listener.address.rpartition(":")[2])
    silent = [socket.create_connection(place) for _ in range(66)]
    reset: list[int] = []

    def read() -> int:
        for number, sock in enumerate(silent):
            try:
                while number not in reset:
                    assert sock.recv(100, socket.MSG_DONTWAIT)[0] == 0xFF  # the greeting of ZeroMQ
            except BlockingIOError:
                pass
            except ConnectionResetError:
                reset.append(number)
        return len(reset)

    await until(lambda: read() == 2)
    await turns(10)
    assert read() == 2
    assert sorted(reset) == [0, 1]
    for sock in silent:
        sock.close()
