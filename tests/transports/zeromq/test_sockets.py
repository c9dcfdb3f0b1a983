"""A ZeroMQ socket on the event loop whose reader is interrupted by signals."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from aiotensor.transports.zeromq.context import ZmqContext
from aiotensor.transports.zeromq.sockets import LoopSocket

# Python ignores an exception of a signal handler that runs while pyzmq frees a part.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PARTS = 20
CONNECTIONS = 5
INTERRUPTIONS = 100
INTERVAL_S = 0.0005


class Interrupted(BaseException):
    """A signal handler raised, as `sys.exit` does."""


class Owner:
    """Collects the messages of a socket."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []
        self.is_connected = asyncio.Event()

    def message_arrived(self, parts: list[zmq.Frame]) -> None:
        self.messages.append([part.bytes for part in parts[1:]])

    def connected(self, descriptor: int) -> None:
        self.is_connected.set()

    def handshaken(self) -> None: ...

    def unreachable(self) -> None: ...

    def refused(self, *, is_final: bool, error: int) -> None: ...

    def disconnected(self, descriptor: int) -> None: ...

    def writable(self) -> None: ...


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


async def test_a_message_whose_reading_was_interrupted_does_not_continue_as_another_message() -> None:
    owner = Owner()
    with ZmqContext() as context, context.socket(zmq.DEALER) as peer:
        sock = LoopSocket(context, zmq.ROUTER, {}, owner)
        sock.bind("inproc://interrupted")
        peer.connect("inproc://interrupted")
        assert _interrupted(lambda: peer.send_multipart([b"part"] * PARTS), sock.read_now) == INTERRUPTIONS
        sock.close()
    assert owner.messages
    assert {len(message) for message in owner.messages} == {PARTS}


async def test_a_connection_is_reported_after_the_reading_of_events_was_interrupted(tmp_path: Path) -> None:
    owner, place = Owner(), str(tmp_path / "socket")
    with ZmqContext() as context:
        sock = LoopSocket(context, zmq.ROUTER, {}, owner)
        sock.bind(f"ipc://{place}")

        def connect_and_close() -> None:
            for _ in range(CONNECTIONS):
                with socket.socket(socket.AF_UNIX) as peer:
                    peer.connect(place)

        assert _interrupted(connect_and_close, sock.monitor.report_first) == INTERRUPTIONS
        owner.is_connected.clear()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(place)
            async with asyncio.timeout(30):
                await owner.is_connected.wait()
        sock.close()
