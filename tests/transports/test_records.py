import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.records import RecordReader, RecordSocket, record_pair
from tests.transports.ends import End, fill, is_open, open_sockets, read_all, turns


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = open_sockets()  # the loop comes and goes in between
    yield
    assert open_sockets() == before


@pytest.fixture
async def pair() -> AsyncIterator[tuple[End, socket.socket]]:
    """One end on the loop, and the bare socket at the other end."""
    near, far = record_pair()
    end = End(near)
    with far:
        yield end, far
        end.socket.close()


async def test_records_stay_whole_and_in_order_both_ways() -> None:
    one, other = map(End, record_pair())
    for number in range(200):
        one.socket.write(bytes([number]) * (number + 1))
        other.socket.write(bytes([number]))

    assert [await other.read() for _ in range(200)] == [bytes([n]) * (n + 1) for n in range(200)]
    assert [await one.read() for _ in range(200)] == [bytes([n]) for n in range(200)]
    one.socket.close()
    await other.was_closed.wait()
    assert one.closed == []


async def test_the_largest_record_arrives_whole(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    record = os.urandom(MAX_RECORD_BYTES)
    far.send(record)
    assert await end.read() == record

    end.socket.write(record)
    assert far.recv(2 * MAX_RECORD_BYTES) == record


async def test_a_record_that_is_too_long_arrives_cut_off_but_too_long_and_the_next_one_whole(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    far.send(b"x" * (MAX_RECORD_BYTES + 1000))
    far.send(b"next")

    assert len(await end.read()) == MAX_RECORD_BYTES + 1
    assert await end.read() == b"next"


async def test_what_arrives_in_many_records_leaves_the_loop_to_others_in_between(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    for number in range(100):
        far.send(bytes([number]))
    first = await end.read()

    assert end.arrived.qsize() < 99
    assert [first, *[await end.read() for _ in range(99)]] == [bytes([number]) for number in range(100)]


async def test_descriptors_travel_with_their_record_and_ours_are_closed(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    reading_end, writing_end = os.pipe()
    end.socket.write(b"a pipe", [writing_end])
    assert not is_open(writing_end)

    data, [arrived], _, _ = socket.recv_fds(far, 100, 8)
    os.write(arrived, b"through the pipe")
    assert (data, os.read(reading_end, 100)) == (b"a pipe", b"through the pipe")
    os.close(reading_end)
    os.close(arrived)


async def test_descriptors_that_arrive_are_given_with_their_record_and_to_no_child(
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


async def test_what_else_the_kernel_tells_of_a_record_is_no_descriptor(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    end.socket._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # who wrote it, for example
    far.send(b"signed")

    assert await end.read() == b"signed"


async def test_descriptors_for_which_there_is_no_room_are_missing_and_the_record_is_not(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    socket.send_fds(far, [b"two"], [0, 0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # no number is free below it
    try:
        record = RecordReader(end.socket._sock).read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert record is not None
    assert (bytes(record[0]), record[1]) == (b"two", [])


async def test_a_reader_says_that_there_is_nothing_yet(pair: tuple[End, socket.socket]) -> None:
    end, _ = pair

    assert RecordReader(end.socket._sock).read() is None


async def test_an_empty_record_is_no_end_and_hands_its_descriptors_over(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    reader = RecordReader(end.socket._sock)
    before = open_sockets()
    socket.send_fds(far, [b""], [far.fileno()] * 2)
    record = reader.read()
    assert record is not None
    close_all(record[1])

    assert (bytes(record[0]), len(record[1])) == (b"", 2)
    assert open_sockets() == before
    assert reader.read() is None


@pytest.mark.parametrize("behind", [[], [b"last"], [b"", b"last", b""]], ids=len)
async def test_an_empty_record_is_no_end_also_when_the_other_side_has_closed(behind: list[bytes]) -> None:
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


async def test_a_record_that_would_queue_beyond_the_limit_is_refused_and_nothing_of_it_is_kept() -> None:
    near, far = record_pair()
    end = RecordSocket(near, on_record=None, on_closed=lambda reason: None, max_unsent_bytes=100_000)
    written = 0
    with far, pytest.raises(OSError, match="does not read"):
        while True:
            end.write(bytes(1000), [os.dup(far.fileno())])
            written += 1
    assert written * 1000 > 100_000  # what the kernel has does not count
    with pytest.raises(OSError, match="does not read"):
        end.write(bytes(1000))
    end.close()


async def test_what_was_sent_after_all_leaves_room_in_the_queue() -> None:
    near, far = record_pair()
    end = RecordSocket(near, on_record=None, on_closed=lambda reason: None, max_unsent_bytes=100_000)
    with far:
        for _ in range(5):
            with contextlib.suppress(OSError):
                while True:
                    end.write(bytes(1000))
            while not end.is_flushed:
                with contextlib.suppress(BlockingIOError):
                    far.recv(1000)
                await turns(1)
        assert end._unsent_bytes == 0
    end.close()


async def test_writing_does_not_block_on_a_socket_that_another_process_made_block(
    pair: tuple[End, socket.socket],
) -> None:
    end, _ = pair
    os.set_blocking(end.socket._sock.fileno(), True)  # what a copy of the descriptor can do anywhere
    fill(end)
    assert not end.socket.is_flushed


# A full socket


async def test_what_a_full_socket_does_not_take_is_sent_in_order_when_there_is_room(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    count = fill(end)
    for number in range(count, count + 50):
        end.socket.write(number.to_bytes(4))
    flushing = asyncio.create_task(end.socket.flush())
    await turns()
    assert not flushing.done()

    numbers = read_all(far)
    while not flushing.done():
        await asyncio.sleep(0)
        numbers += read_all(far)
    assert end.socket.is_flushed
    assert [*numbers, *read_all(far)] == list(range(count + 50))


async def test_no_record_overtakes_one_that_waits_for_room(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    count = fill(end)
    numbers = read_all(far)
    end.socket.write(count.to_bytes(4))  # there is room for it, but it is not its turn
    await end.socket.flush()

    assert [*numbers, *read_all(far)] == list(range(count + 1))


async def test_a_queued_record_takes_its_descriptors_along(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    fill(end)
    reading_end, writing_end = os.pipe()
    end.socket.write(b"a pipe", [writing_end])
    assert is_open(writing_end)

    read_all(far)
    await end.socket.flush()
    assert not is_open(writing_end)
    descriptors: list[int] = []
    while not descriptors:
        _, descriptors, _, _ = socket.recv_fds(far, 2000, 8)
    for descriptor in (reading_end, *descriptors):
        os.close(descriptor)


async def test_flushing_what_is_flushed_does_not_wait(pair: tuple[End, socket.socket]) -> None:
    end, _ = pair
    others_ran: list[bool] = []
    asyncio.get_running_loop().call_soon(others_ran.append, True)
    await end.socket.flush()

    assert not others_ran


async def test_cancelling_a_flush_loses_nothing_and_leaves_the_other_flushers(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    count = fill(end)
    cancelled, patient = (asyncio.create_task(end.socket.flush()) for _ in range(2))
    await turns()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not patient.done()

    numbers = read_all(far)
    await patient
    assert numbers + read_all(far) == list(range(count))


@pytest.mark.parametrize("first", ["close", "cancel"])
async def test_a_flusher_cancelled_in_the_turn_in_which_it_ends_is_cancelled(
    first: str, pair: tuple[End, socket.socket]
) -> None:
    end, _ = pair
    fill(end)
    flushing, other = (asyncio.create_task(end.socket.flush()) for _ in range(2))
    await turns()
    if first == "close":
        end.socket.close()
        flushing.cancel()
    else:
        flushing.cancel()
        end.socket.close()

    with pytest.raises(asyncio.CancelledError):
        await flushing
    await other


async def test_an_idle_socket_is_not_watched_for_room(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    fill(end)
    read_all(far)
    await end.socket.flush()

    assert not asyncio.get_running_loop().remove_writer(end.socket._sock.fileno())
