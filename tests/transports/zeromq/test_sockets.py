"""A ZeroMQ socket on the event loop whose reader is interrupted by signals."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from aiotensor.transports.zeromq.context import ZmqContext
from aiotensor.transports.zeromq.sockets import LoopSocket

PARTS = 20
INTERRUPTIONS = 100
INTERVAL_S = 0.0005


class Interrupted(BaseException):
    """A signal handler raised, as `sys.exit` does."""


class Owner:
    """Collects the messages of a socket."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []

    def message_arrived(self, parts: list[zmq.Frame]) -> None:
        self.messages.append([part.bytes for part in parts[1:]])

    def connected(self, descriptor: int) -> None: ...

    def handshaken(self) -> None: ...

    def unreachable(self) -> None: ...

    def refused(self, *, is_final: bool, error: int) -> None: ...

    def disconnected(self, descriptor: int) -> None: ...

    def writable(self) -> None: ...


@contextmanager
def _interruptions(reading: list[bool]) -> Iterator[None]:
    """Raise `Interrupted` at short intervals while `reading` is not empty."""

    def interrupt(*_: object) -> None:
        if reading:
            reading.clear()
            raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL_S, INTERVAL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Python ignores an exception of a signal handler that runs while pyzmq frees a part.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_message_whose_reading_was_interrupted_does_not_continue_as_another_message() -> None:
    owner, reading, interrupted = Owner(), list[bool](), 0
    until = time.monotonic() + 30
    with ZmqContext() as context, context.socket(zmq.DEALER) as peer:
        sock = LoopSocket(context, zmq.ROUTER, {}, owner)
        sock.bind("inproc://interrupted")
        peer.connect("inproc://interrupted")
        with _interruptions(reading):
            while interrupted < INTERRUPTIONS and time.monotonic() < until:
                peer.send_multipart([b"part"] * PARTS)
                try:
                    reading.append(True)
                    sock.read_now()
                    reading.clear()
                except Interrupted:
                    interrupted += 1
        sock.close()
    assert interrupted == INTERRUPTIONS
    assert owner.messages
    assert {len(message) for message in owner.messages} == {PARTS}
