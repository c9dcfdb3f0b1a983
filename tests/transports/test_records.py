"""Records over sockets: order, boundaries, descriptors, and the queue of a full socket."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.records import RecordReader, SocketTransport, record_pair
from tests.transports.ends import End, end_of, fill, is_open, open_sockets, read_all, turns
from tests.transports.unix_ends import no_descriptors


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = record_pair()
    with near, far:
        yield near, far


async def test_records_stay_whole_and_in_order_both_ways() -> None:
    one, other = map(end_of, record_pair())
    for number in range(200):
        one.transport.write(bytes([number]) * (number + 1))
        other.transport.write(bytes([number]))

    assert [await other.read() for _ in range(200)] == [bytes([n]) * (n + 1) for n in range(200)]
    assert [await one.read() for _ in range(200)] == [bytes([n]) for n in range(200)]
    one.transport.close()
    await other.was_lost.wait()
    assert one.lost == []


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


async def test_reading_many_records_yields_to_the_event_loop(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    for number in range(100):
        far.send(bytes([number]))
    first = await end.read()

    assert end.arrived.qsize() < 99
    assert [first, *[await end.read() for _ in range(99)]] == [bytes([number]) for number in range(100)]


async def test_descriptors_travel_with_their_record_and_the_caller_keeps_its_own(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    reading_end, writing_end = os.pipe()
    end.transport.write(b"a pipe", [writing_end])
    os.close(writing_end)  # which fails if it is closed

    data, [arrived], _, _ = socket.recv_fds(far, 100, 8)
    os.write(arrived, b"through the pipe")
    assert (data, os.read(reading_end, 100)) == (b"a pipe", b"through the pipe")
    os.close(reading_end)
    os.close(arrived)


async def test_received_descriptors_accompany_their_record_and_are_not_inheritable(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    reading_end, writing_end = os.pipe()
    socket.send_fds(far, [b"two"], [reading_end, writing_end])
    far.send(b"none")

    data, descriptors = await end.arrived.get()
    assert (data, len(descriptors)) == (b"two", 2)
    assert not any(map(os.get_inheritable, descriptors))
    assert await end.read() == b"none"
    for descriptor in (reading_end, writing_end, *descriptors):
        os.close(descriptor)


async def test_other_ancillary_data_is_not_taken_for_descriptors() -> None:
    near, far = record_pair()
    end = end_of(near)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # adds the ids of the writer
    with far:
        far.send(b"signed")
        assert await end.read() == b"signed"
    end.transport.close()


def test_a_record_arrives_without_descriptors_that_cannot_be_received(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    near, far = sockets
    socket.send_fds(far, [b"two"], [0, 0])
    with no_descriptors():
        record = RecordReader(near).read()

    assert record is not None
    assert (bytes(record[0]), record[1]) == (b"two", [])


def test_a_reader_returns_none_while_there_is_no_record(sockets: tuple[socket.socket, socket.socket]) -> None:
    assert RecordReader(sockets[0]).read() is None


def test_an_empty_record_is_not_the_end_and_carries_its_descriptors(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    near, far = sockets
    reader = RecordReader(near)
    before = open_sockets()
    socket.send_fds(far, [b""], [far.fileno()] * 2)
    record = reader.read()
    assert record is not None
    close_all(record[1])

    assert (bytes(record[0]), len(record[1])) == (b"", 2)
    assert open_sockets() == before
    assert reader.read() is None


@pytest.mark.parametrize("behind", [[], [b"last"], [b"", b"last", b""]], ids=len)
async def test_an_empty_record_is_not_the_end_even_if_the_peer_has_closed(behind: list[bytes]) -> None:
    near, far = record_pair()
    for record in (b"", *behind):
        far.send(record)
    far.close()
    with near:
        reader = RecordReader(near)
        read = []
        with contextlib.suppress(EOFError):
            while (found := reader.read()) is not None:
                read.append(bytes(found[0]))
    assert [record for record in read if record] == [record for record in behind if record]


async def test_a_record_beyond_the_queue_limit_raises_and_keeps_no_descriptors() -> None:
    near, far = record_pair()
    end = end_of(near, max_unsent_bytes=100_000)
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


async def test_sent_records_leave_room_in_the_queue() -> None:
    near, far = record_pair()
    end = end_of(near, max_unsent_bytes=100_000)
    counts = []
    with far:
        for _ in range(5):
            end.resumed.clear()
            counts.append(0)
            with contextlib.suppress(OSError):
                while True:
                    end.transport.write(bytes(1000))
                    counts[-1] += 1
            while not end.resumed.is_set():
                read_all(far)
                await turns(1)
            read_all(far)
    assert min(counts) == max(counts) > 0
    end.transport.close()


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


async def test_read_now_reports_the_end_of_the_connection(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    far.close()
    end.transport.read_now()
    assert end.lost == ["the peer closed the connection"]
    end.transport.read_now()
    assert len(end.lost) == 1


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


async def test_further_records_go_to_another_handler_once_it_is_set(pair: tuple[End, socket.socket]) -> None:
    first, far = pair
    far.send(b"for the first")
    assert await first.read() == b"for the first"
    second = End(first.transport)
    far.send(b"for the second")
    assert await second.read() == b"for the second"
    far.close()
    await second.was_lost.wait()

    assert first.arrived.empty()
    assert first.lost == []


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


# A full socket


async def test_records_that_a_full_socket_does_not_accept_are_sent_later_in_order(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    count = fill(end.transport)
    for number in range(count, count + 50):
        end.transport.write(number.to_bytes(4))
    await turns()
    assert not end.resumed.is_set()

    numbers: list[int] = []
    while not end.resumed.is_set():
        numbers += read_all(far)
        await asyncio.sleep(0)
    assert end.transport.is_writable
    assert [*numbers, *read_all(far)] == list(range(count + 50))
    assert end.resumptions == 1


async def test_no_record_overtakes_a_queued_one(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    count = fill(end.transport)
    numbers = read_all(far)
    end.transport.write(count.to_bytes(4))  # the socket would accept it
    await end.resumed.wait()

    assert [*numbers, *read_all(far)] == list(range(count + 1))


async def test_a_queued_record_carries_copies_of_its_descriptors(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    fill(end.transport)
    reading_end, writing_end = os.pipe()
    end.transport.write(b"a pipe", [writing_end])
    assert is_open(writing_end)
    os.close(writing_end)

    read_all(far)
    await end.resumed.wait()
    arrived: list[int] = []
    while not arrived:
        _, arrived, _, _ = socket.recv_fds(far, 2000, 8)
    close_all(arrived)
    assert os.read(reading_end, 1) == b"", "the copy was closed once it was sent"
    os.close(reading_end)


async def test_writing_resumes_again_after_each_time_the_queue_was_emptied(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    for times in range(1, 4):
        fill(end.transport)
        end.resumed.clear()
        read_all(far)
        await end.resumed.wait()
        assert end.resumptions == times


async def test_an_idle_socket_is_not_watched_for_writing() -> None:
    near, far = record_pair()
    end = end_of(near)
    with far:
        fill(end.transport)
        read_all(far)
        await end.resumed.wait()
        assert not asyncio.get_running_loop().remove_writer(near.fileno())
        end.transport.close()
