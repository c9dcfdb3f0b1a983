import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from aiotensor.transports.records import RECORDS_A_TURN, RecordReader, RecordSocket, record_pair
from tests.transports.ends import End, fill, is_open, open_sockets, turns


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


async def test_the_end_is_told_once_after_the_last_record(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    far.send(b"last words")
    far.close()
    await end.was_closed.wait()
    end.socket.write(b"to nobody")
    await turns()

    assert await end.read() == b"last words"
    assert end.closed == ["the other side closed the connection"]


async def test_last_words_arrive_also_from_one_who_has_not_read_everything(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    end.socket.write(b"never read")
    far.send(b"last words")
    far.close()
    await end.was_closed.wait()

    assert end.arrived.qsize() == 1


async def test_many_last_words_arrive_whole_from_one_who_has_not_read_everything(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    end.socket.write(b"never read")
    for number in range(5 * RECORDS_A_TURN):
        far.send(bytes([number]))
    far.close()
    await end.was_closed.wait()

    assert end.arrived.qsize() == 5 * RECORDS_A_TURN


async def test_last_words_arrive_whole_although_writing_failed_before_they_were_read(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    for number in range(5 * RECORDS_A_TURN):
        far.send(bytes([number]))
    far.close()
    end.socket.write(b"to nobody")
    end.socket.write(b"to nobody either")
    await end.was_closed.wait()

    words = [await end.read() for _ in range(end.arrived.qsize())]
    assert words == [bytes([number]) for number in range(5 * RECORDS_A_TURN)]
    assert end.closed == ["the other side closed the connection"]


async def test_last_words_arrive_whole_although_what_waited_for_room_has_failed(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    fill(end)
    reading_end, writing_end = os.pipe()
    end.socket.write(b"queued", [reading_end, writing_end])
    for number in range(5 * RECORDS_A_TURN):
        far.send(bytes([number]))
    far.close()
    await end.socket.flush()
    await end.was_closed.wait()

    assert end.arrived.qsize() == 5 * RECORDS_A_TURN
    assert not is_open(reading_end)
    assert not is_open(writing_end)


async def test_an_end_that_never_reads_learns_by_writing() -> None:
    near, far = record_pair()
    end = End(near, reads=False)
    far.close()
    reading_end, writing_end = os.pipe()
    end.socket.write(b"to nobody", [reading_end, writing_end])
    end.socket.write(b"to nobody either")
    assert end.closed == [], "not from within the call that writes"
    await end.was_closed.wait()
    await turns()

    assert end.closed == ["nobody reads it any more"]
    assert not is_open(reading_end)
    assert not is_open(writing_end)


async def test_what_waited_for_room_learns_of_the_end_and_its_descriptors_are_closed() -> None:
    near, far = record_pair()
    end = End(near, reads=False)
    fill(end)
    reading_end, writing_end = os.pipe()
    end.socket.write(b"queued", [reading_end, writing_end])
    flushing = asyncio.create_task(end.socket.flush())
    far.close()
    await flushing
    await end.was_closed.wait()

    assert end.closed == ["nobody reads it any more"]
    assert not is_open(reading_end)
    assert not is_open(writing_end)


async def test_nothing_is_told_after_closing(pair: tuple[End, socket.socket]) -> None:
    end, far = pair
    far.send(b"unread")
    end.socket.close()
    end.socket.close()
    far.close()
    await turns(5)

    assert end.closed == []
    assert end.arrived.empty()


async def test_closing_in_the_turn_in_which_the_socket_became_full_leaves_nothing_to_watch(
    pair: tuple[End, socket.socket],
) -> None:
    end, _ = pair
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    fill(end)
    end.socket.close()
    await turns()

    assert errors == []


async def test_the_handler_of_a_record_may_close_the_socket() -> None:
    near, far = record_pair()
    arrived: list[bytes] = []
    has_closed = asyncio.Event()

    def take_one(data: memoryview, _: list[int]) -> None:
        arrived.append(bytes(data))
        sock.close()
        has_closed.set()

    sock = RecordSocket(near, on_record=take_one, on_closed=pytest.fail)
    with far:
        far.send(b"first")
        far.send(b"second")
        await has_closed.wait()
        await turns()

    assert arrived == [b"first"]


async def test_closing_wakes_all_flushers_and_drops_what_waits_with_its_descriptors(
    pair: tuple[End, socket.socket],
) -> None:
    end, _ = pair
    fill(end)
    reading_end, writing_end = os.pipe()
    end.socket.write(b"queued", [reading_end, writing_end])
    flushing = [asyncio.create_task(end.socket.flush()) for _ in range(3)]
    await turns()
    end.socket.close()
    await asyncio.gather(*flushing)

    assert not is_open(reading_end)
    assert not is_open(writing_end)
    await end.socket.flush()


async def test_writing_after_closing_does_nothing_but_closes_the_descriptors(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    end.socket.close()
    reading_end, writing_end = os.pipe()
    end.socket.write(b"too late", [reading_end, writing_end])

    assert not is_open(reading_end)
    assert not is_open(writing_end)
    assert far.recv(100) == b""


async def test_a_record_that_the_kernel_refuses_raises_and_closes_its_descriptors(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    reading_end, writing_end = os.pipe()
    with pytest.raises(OSError, match="Message too long"):
        end.socket.write(bytes(1 << 24), [reading_end, writing_end])

    assert not is_open(reading_end)
    assert not is_open(writing_end)
    end.socket.write(b"the next one")
    assert far.recv(100) == b"the next one"


async def test_reading_that_fails_ends_the_socket_with_the_reason(
    pair: tuple[End, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: RecordReader) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    end, far = pair
    monkeypatch.setattr(RecordReader, "read", fail)
    far.send(b"x")
    await end.was_closed.wait()

    assert end.closed == ["reading failed: [Errno 12] no memory"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_does_not_keep_the_other_side_from_hearing_of_the_end(
    pair: tuple[End, socket.socket],
) -> None:
    end, far = pair
    reading_end, writing_end = os.pipe()
    ready, is_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing_end)
        os.write(is_ready, b"x")
        os.read(reading_end, 1)  # for as long as the parent looks
        os._exit(0)
    try:
        os.read(ready, 1)
        end.socket.close()
        assert far.recv(100) == b""
    finally:
        for number in (writing_end, reading_end, ready, is_ready):
            os.close(number)
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it ends at once
