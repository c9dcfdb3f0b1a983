"""Records over sockets: order, boundaries, descriptors, and the queue of a full socket."""

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.records import SocketTransport
from tests.transports.ends import End, end_of, fill, read_all, record_pair, turns
from tests.transports.unix_ends import no_descriptors


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = record_pair()
    with near, far:
        yield near, far


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


async def test_a_record_beyond_the_queue_limit_raises_and_keeps_no_descriptors() -> None:
    near, far = record_pair()
    end = end_of(near)
    end.transport.limit_queue(100_000)
    reading_end, writing_end = os.pipe()
    written = 0
    with far, pytest.raises(OSError, match="does not read"):
        while True:
            end.transport.write(bytes(1000), [writing_end])
            written += 1
    assert written * 1000 > 100_000  # bytes that the kernel accepted do not count
    with pytest.raises(OSError, match="does not read"):
        end.transport.write(bytes(1000))
    end.transport.close()
    os.close(writing_end)
    assert os.read(reading_end, 1) == b"", "no copy of the descriptor is open"
    os.close(reading_end)


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
