"""Records over sockets: order, boundaries, descriptors, the queue of a full socket, and the end."""

import asyncio
import contextlib
import os
import socket

import pytest

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.records import SocketTransport
from tests.transports.ends import End, end_of, fill, read_all, record_pair, turns
from tests.transports.unix_ends import no_descriptors


async def test_the_largest_record_arrives_whole(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    record = os.urandom(MAX_RECORD_BYTES)
    far.send(record)
    assert await end.read() == record

    end.transport.write(record)
    assert far.recv(2 * MAX_RECORD_BYTES) == record


async def test_an_oversized_record_is_truncated_and_the_next_one_is_intact(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    far.send(b"x" * (MAX_RECORD_BYTES + 1000))
    far.send(b"next")

    assert len(await end.read()) == MAX_RECORD_BYTES + 1
    assert await end.read() == b"next"


async def test_other_ancillary_data_is_not_taken_for_descriptors() -> None:
    near, far = record_pair()
    end = end_of(near)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # adds the ids of the writer
    with far:
        far.send(b"signed")
        assert await end.read() == b"signed"
    end.transport.close()


async def test_a_record_arrives_without_descriptors_that_cannot_be_received(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    socket.send_fds(far, [b"two"], [0, 0])
    with no_descriptors():
        end.transport.read_now()

    assert end.arrived.get_nowait() == (b"two", [])


async def test_an_empty_record_ends_the_connection_unless_it_has_descriptors(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    socket.send_fds(far, [b""], [far.fileno()] * 2)
    far.send(b"")
    end.transport.read_now()
    data, descriptors = end.arrived.get_nowait()
    close_all(descriptors)
    assert (data, len(descriptors)) == (b"", 2)
    end.transport.read_now()
    assert end.lost == ["the peer closed the connection"]


async def test_writing_does_not_block_on_a_socket_that_another_process_made_blocking() -> None:
    near, far = record_pair()
    end = end_of(near)
    os.set_blocking(near.fileno(), True)  # as any process with a copy of the descriptor may do
    with far:
        fill(end.transport)
        assert not end.transport.is_writable
        end.transport.close()


async def test_queueing_a_record_raises_when_its_descriptors_cannot_be_duplicated(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    count = fill(end.transport)
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        end.transport.write(b"a socket, twice", [far.fileno()] * 2)
    end.transport.write(count.to_bytes(4))

    numbers = read_all(far)
    await end.resumed.wait()
    assert [*numbers, *read_all(far)] == list(range(count + 1))


async def test_read_now_reads_a_record_before_the_event_loop_does(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    end.transport.read_now()
    assert end.arrived.empty()
    far.send(b"first")
    far.send(b"second")
    end.transport.read_now()
    assert end.arrived.get_nowait() == (b"first", [])
    assert end.arrived.empty()
    assert await end.read() == b"second"
    far.close()
    for _ in range(2):
        end.transport.read_now()
        assert end.lost == ["the peer closed the connection"]


async def test_nothing_is_read_before_a_handler_is_set() -> None:
    near, far = record_pair()
    transport = SocketTransport(near)
    with far:
        far.send(b"early")
        transport.read_now()
        await turns()
        end = End(transport)
        assert await end.read() == b"early"
    transport.close()


async def test_a_handler_may_set_another_one_while_it_handles_a_record() -> None:
    near, far = record_pair()
    ends: list[End] = []
    first = End(SocketTransport(near), lambda: ends.append(End(first.transport)))
    with far:
        for number in range(3):
            far.send(bytes([number]))
        assert await first.read() == b"\0"
        assert [await ends[0].read() for _ in range(2)] == [b"\1", b"\2"]
    first.transport.close()


async def test_no_record_overtakes_a_queued_one(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    count = fill(end.transport)
    numbers = read_all(far)
    end.transport.write(count.to_bytes(4))  # the socket would accept it
    await end.resumed.wait()

    assert [*numbers, *read_all(far)] == list(range(count + 1))


async def test_an_idle_socket_is_not_watched_for_writing() -> None:
    near, far = record_pair()
    end = end_of(near)
    with far:
        for times in range(1, 4):
            fill(end.transport)
            end.resumed.clear()
            read_all(far)
            await end.resumed.wait()
            assert end.resumptions == times
            assert not asyncio.get_running_loop().remove_writer(near.fileno())
        end.transport.close()


# The end of a connection, from either side


class Pipe:
    """A pipe whose writing end is written to a transport; `check_closed` fails if a copy of it is open."""

    def __init__(self) -> None:
        self._reading_end, self.writing_end = os.pipe()

    def check_closed(self) -> None:
        os.close(self.writing_end)
        assert os.read(self._reading_end, 1) == b""
        os.close(self._reading_end)


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
