"""Records over sockets: the end of a connection, from either side."""

import asyncio
import contextlib
import os
import socket

import pytest

from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.records import SocketTransport
from tests.transports.ends import End, end_of, fill, record_pair, turns


class Pipe:
    """A pipe whose writing end is written to a transport; `check_closed` fails if a copy of it is open."""

    def __init__(self) -> None:
        self._reading_end, self.writing_end = os.pipe()

    def check_closed(self) -> None:
        os.close(self.writing_end)
        assert os.read(self._reading_end, 1) == b""
        os.close(self._reading_end)


async def test_the_last_records_arrive_from_a_peer_that_had_not_read_everything(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    end.transport.write(b"never read")
    for number in range(20):
        far.send(bytes([number]))
    far.close()
    await end.was_lost.wait()

    assert end.arrived.qsize() == 20


async def test_the_last_records_arrive_although_writing_failed_before_they_were_read(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    for number in range(20):
        far.send(bytes([number]))
    far.close()
    end.transport.write(b"to nobody")
    end.transport.write(b"to nobody either")
    await end.was_lost.wait()

    words = [await end.read() for _ in range(end.arrived.qsize())]
    assert words == [bytes([number]) for number in range(20)]
    assert end.lost == ["the peer closed the connection"]


async def test_the_last_records_arrive_although_queued_ones_could_not_be_sent(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    pipe = Pipe()
    fill(end.transport)
    end.transport.write(b"queued", [pipe.writing_end])
    for number in range(20):
        far.send(bytes([number]))
    far.close()
    await end.was_lost.wait()

    assert end.arrived.qsize() == 20
    assert end.lost == ["the peer closed the connection"]
    pipe.check_closed()


async def test_the_handler_of_a_record_may_close_the_transport() -> None:
    near, far = record_pair()
    end = End(SocketTransport(near), lambda: end.transport.close())
    with far:
        far.send(b"first")
        far.send(b"second")
        assert await end.read() == b"first"
        await turns()

    assert end.arrived.empty()
    assert end.lost == []


class _ClosesWhenResumed(End):
    def resume_writing(self) -> None:
        super().resume_writing()
        self.transport.close()


async def test_the_handler_of_writing_that_resumes_may_close_the_transport() -> None:
    near, far = record_pair()
    end = _ClosesWhenResumed(SocketTransport(near))
    fill(end.transport)
    with far:
        while far.recv(2000):
            await asyncio.sleep(0)
    assert (end.resumptions, end.lost) == (1, [])


async def test_a_record_that_the_kernel_refuses_raises_and_the_next_one_is_sent(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    pipe = Pipe()
    with pytest.raises(OSError, match="Message too long"):
        end.transport.write(bytes(1 << 24), [pipe.writing_end])
    end.transport.write(b"the next one")

    assert far.recv(100) == b"the next one"
    pipe.check_closed()


async def test_a_queued_record_that_the_kernel_refuses_ends_the_connection_with_the_reason(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    fill(end.transport)
    end.transport.write(bytes(1 << 22))
    while not end.lost:
        with contextlib.suppress(BlockingIOError):
            far.recv(2000)
        await asyncio.sleep(0)

    assert end.lost == ["writing failed: [Errno 90] Message too long"]
    assert end.transport.is_closed


async def test_reading_that_fails_ends_the_connection_with_the_reason() -> None:
    near, far = record_pair()
    end = end_of(near)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, near.fileno())  # as a library does that closes a descriptor which is not its own
    os.close(null)
    with far:
        end.transport.read_now()

    assert end.lost == ["reading failed: [Errno 88] Socket operation on non-socket"]
    assert end.transport.is_closed


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_keeps_neither_the_connection_nor_queued_descriptors(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    pipe = Pipe()
    fill(end.transport)
    end.transport.write(b"queued", [pipe.writing_end])
    gate, open_gate = os.pipe()
    ready, is_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(open_gate)
        os.close(pipe.writing_end)
        os.write(is_ready, b"x")
        os.read(gate, 1)  # until the parent has closed its end
        os._exit(0)
    try:
        os.read(ready, 1)
        end.transport.close()
        pipe.check_closed()
        while far.recv(2000):
            pass
    finally:
        close_all([open_gate, gate, ready, is_ready])
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it exits at once
