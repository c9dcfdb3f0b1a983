"""A ZeroMQ socket on the event loop whose reader is interrupted by signals."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable

import pytest
import zmq

from aiotensor.transports.tcp.sockets import ACCEPTED, LoopSocket, ZmqContext

# Python ignores an exception of a signal handler that runs while pyzmq frees a part.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONNECTIONS = 5
INTERRUPTIONS = 100
INTERVAL_S = 0.0005


class Interrupted(BaseException):
    """A signal handler raised, as `sys.exit` does."""


class Listening(LoopSocket):
    """A socket that collects its messages."""

    def __init__(self, context: ZmqContext) -> None:
        super().__init__(context, zmq.ROUTER, 0, {zmq.RCVHWM: 0})
        self.messages: list[bytes] = []
        self.is_connected = asyncio.Event()
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def message_arrived(self, parts: list[zmq.Frame]) -> None:
        self.messages.append(parts[1].bytes)

    def event(self, kind: int, value: int) -> None:
        if kind == ACCEPTED:
            self.is_connected.set()

    def ended(self, identity: bytes) -> None: ...


def _interrupted(feed: Callable[[], object], read: Callable[[], object]) -> int:
    """Call two functions in turn, and return how often a signal handler has interrupted the second one."""
    is_reading, interrupted = False, 0

    def interrupt(*_: object) -> None:
        nonlocal is_reading
        if is_reading:
            is_reading = False
            raise Interrupted

    until = time.monotonic() + 30
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL_S, INTERVAL_S)
    try:
        while interrupted < INTERRUPTIONS and time.monotonic() < until:
            feed()
            try:
                is_reading = True
                read()
                is_reading = False
            except Interrupted:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return interrupted


async def test_no_part_is_taken_for_a_message_after_an_interruption_or_behind_too_many_parts() -> None:
    with ZmqContext() as context, context.socket(zmq.DEALER) as peer:
        listening = Listening(context)
        peer.connect(listening.address)

        def feed() -> None:
            for _ in range(10):
                peer.send_multipart([b"first", *[b"too many"] * 7])

        assert _interrupted(feed, lambda: listening.read_now(20)) == INTERRUPTIONS
        listening.shut()
    assert set(listening.messages) == {b"first"}


async def test_a_connection_is_reported_after_the_reading_of_events_was_interrupted() -> None:
    with ZmqContext() as context:
        listening = Listening(context)
        place = "127.0.0.1", int(listening.address.rpartition(":")[2])

        def connect_and_close() -> None:
            for _ in range(CONNECTIONS):
                socket.create_connection(place).close()

        assert _interrupted(connect_and_close, listening._report) == INTERRUPTIONS
        listening.is_connected.clear()
        with socket.create_connection(place):
            async with asyncio.timeout(30):
                await listening.is_connected.wait()
        listening.shut()
