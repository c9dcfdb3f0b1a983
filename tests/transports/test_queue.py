"""Connections over a queue: the first record of a sender, its end, and the end of the listener."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from aiotensor.errors import UsageError
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import Transport
from aiotensor.transports.queue import QueueConnector, QueueListener, listen_on
from aiotensor.transports.records import record_pair
from aiotensor.transports.tensor_queue import TensorQueue
from tests.transports.ends import End, fill, open_sockets, read_all, turns
from tests.transports.parties import Accepting, Connecting

_SENDER = "0123456789abcdef" * 2
_HELLO, _FRAME = b"H" + _SENDER.encode(), b"F" + _SENDER.encode()


@pytest.fixture
def queue() -> Iterator[TensorQueue]:
    queue = TensorQueue()
    yield queue
    queue.close()


@pytest.fixture
async def accepting() -> AsyncIterator[Accepting]:
    accepting = Accepting()
    yield accepting
    accepting.close()


@pytest.fixture
async def listener(queue: TensorQueue, accepting: Accepting) -> AsyncIterator[QueueListener]:
    listener = await listen_on(queue, accepting, 1 << 16)
    yield listener
    listener.close()


@pytest.fixture
async def connecting(queue: TensorQueue) -> AsyncIterator[Connecting]:
    connecting = Connecting(lambda events: QueueConnector(queue, _SENDER, events))
    yield connecting
    connecting.close()


async def _say_hello(queue: TensorQueue, accepting: Accepting) -> tuple[socket.socket, socket.socket, End]:
    """Return the writing end of a queue, the near end of the pipe of a sender, and its accepted end."""
    writer = queue.open_writer()
    near, far = record_pair()
    with far:
        socket.send_fds(writer, [_HELLO + b"hello"], [far.fileno()])
    end = await accepting.accepted.get()
    assert await end.read() == b"hello"
    return writer, near, end


# The sender


async def test_the_first_record_of_a_sender_carries_its_pipe_and_later_ones_do_not(
    queue: TensorQueue, connecting: Connecting
) -> None:
    connecting.connector.connect()
    [end] = connecting.connections
    end.transport.write(b"second", [0])
    with queue.open_reader() as reader:
        data, [pipe], _, _ = socket.recv_fds(reader, 100, 8)
        assert data == _HELLO + b"introduction 1"
        with socket.socket(fileno=pipe) as sock:
            sock.send(b"through the pipe")
            assert await end.read() == b"through the pipe"
        data, descriptors, _, _ = socket.recv_fds(reader, 100, 8)
        assert (data, len(descriptors)) == (_FRAME + b"second", 1)
        close_all(descriptors)
    await end.was_lost.wait()


async def test_the_next_record_carries_the_pipe_if_the_first_one_is_refused(queue: TensorQueue) -> None:
    class Verbose(Connecting):
        def connected(self, transport: Transport) -> None:
            with pytest.raises(OSError, match="Message too long"):
                transport.write(bytes(1 << 24))
            super().connected(transport)

    connecting = Verbose(lambda events: QueueConnector(queue, _SENDER, events))
    connecting.connector.connect()
    with queue.open_reader() as reader:
        data, [pipe], _, _ = socket.recv_fds(reader, 100, 8)
    os.close(pipe)
    assert data == _HELLO + b"introduction 1"
    await connecting.connections[0].was_lost.wait()


async def test_a_first_record_that_is_queued_carries_the_pipe(
    queue: TensorQueue, connecting: Connecting
) -> None:
    with queue.open_writer() as writer, queue.open_reader() as reader:
        with contextlib.suppress(BlockingIOError):
            while True:
                writer.send(b"F")
        connecting.connector.connect()
        [end] = connecting.connections
        assert not end.transport.is_writable
        while not end.resumed.is_set():
            assert reader.recv(100) == b"F"
            await asyncio.sleep(0)
        data, pipes = b"", list[int]()
        while not pipes:
            data, pipes, _, _ = socket.recv_fds(reader, 100, 8)
    assert data == _HELLO + b"introduction 1"
    close_all(pipes)
    await end.was_lost.wait()  # no copy of the far end is open


async def test_a_connector_checks_the_id_of_its_sender(queue: TensorQueue) -> None:
    with pytest.raises(ValueError, match="32 characters"):
        Connecting(lambda events: QueueConnector(queue, "short", events))


async def test_a_connection_whose_owner_fails_is_closed(queue: TensorQueue, connecting: Connecting) -> None:
    connecting.error = OSError("no memory")
    with pytest.raises(OSError, match="no memory"):
        connecting.connector.connect()


async def test_a_queue_that_was_closed_cannot_be_connected_to(
    queue: TensorQueue, connecting: Connecting
) -> None:
    queue.close()
    with pytest.raises(UsageError, match="was closed"):
        connecting.connector.connect()


async def test_the_last_records_of_a_receiver_arrive_although_writing_to_the_queue_has_failed(
    queue: TensorQueue, listener: QueueListener, accepting: Accepting, connecting: Connecting
) -> None:
    connecting.connector.connect()
    far = await accepting.accepted.get()
    queue.close()
    listener.close()  # no process can read the queue any more
    [near] = connecting.connections
    near.transport.write(b"to nobody")
    await turns()
    assert near.lost == []
    for number in range(20):
        far.transport.write(bytes([number]))
    far.transport.close()
    await near.was_lost.wait()

    assert [await near.read() for _ in range(near.arrived.qsize())] == [bytes([n]) for n in range(20)]
    assert near.lost == ["the peer closed the connection"]


# The listener


async def test_the_end_of_a_sender_is_reported_after_its_records_on_the_queue(
    queue: TensorQueue, listener: QueueListener, accepting: Accepting
) -> None:
    writer, near, end = await _say_hello(queue, accepting)
    with writer:
        for number in range(20):
            writer.send(_FRAME + bytes([number]))
        near.close()
        await end.was_lost.wait()

    assert [await end.read() for _ in range(end.arrived.qsize())] == [bytes([n]) for n in range(20)]
    assert end.lost == ["the peer closed the connection"]


async def test_the_end_of_a_sender_is_reported_although_all_writers_of_the_queue_were_closed_before(
    queue: TensorQueue, listener: QueueListener, accepting: Accepting
) -> None:
    writer, near, end = await _say_hello(queue, accepting)
    queue.close()
    writer.close()
    await turns()  # the listener reads the end of the queue
    assert end.lost == []
    near.close()
    await end.was_lost.wait()
    assert end.lost == ["the peer closed the connection"]


async def test_the_end_of_a_sender_is_reported_although_the_listener_was_closed(
    queue: TensorQueue, listener: QueueListener, accepting: Accepting
) -> None:
    writer, near, end = await _say_hello(queue, accepting)
    with writer:
        fill(end.transport)
        listener.close()
        assert not end.transport.is_writable
        near.close()
        await end.was_lost.wait()
    assert end.transport.is_closed


async def test_a_closed_listener_leaves_the_records_and_writes_to_the_senders(
    queue: TensorQueue, listener: QueueListener, accepting: Accepting
) -> None:
    writer, near, end = await _say_hello(queue, accepting)
    listener.close()
    with writer, near:
        count = fill(end.transport)
        writer.send(_FRAME + b"for the next receiver")
        numbers: list[int] = []
        while not end.resumed.is_set():
            numbers += read_all(near)
            await asyncio.sleep(0)
        assert [*numbers, *read_all(near)] == list(range(count))
        assert end.arrived.empty()
        with queue.open_reader() as reader:
            assert reader.recv(100) == _FRAME + b"for the next receiver"


async def test_further_records_of_a_closed_sender_are_ignored_with_their_descriptors(
    queue: TensorQueue, listener: QueueListener, accepting: Accepting
) -> None:
    writer, near, end = await _say_hello(queue, accepting)
    reading_end, writing_end = os.pipe()
    with writer, near:
        end.transport.close()
        socket.send_fds(writer, [_FRAME + b"ignored"], [writing_end])
        os.close(writing_end)
        assert await asyncio.to_thread(os.read, reading_end, 1) == b""
        os.close(reading_end)
    assert end.arrived.empty()


async def test_a_first_record_with_another_descriptor_than_a_pipe_is_refused_and_logged(
    queue: TensorQueue, listener: QueueListener, accepting: Accepting, caplog: pytest.LogCaptureFixture
) -> None:
    with queue.open_writer() as writer:
        socket.send_fds(writer, [_HELLO + b"hello"], [0])
        writer.send(_FRAME + b"ignored")
        writer, near, _ = await _say_hello(queue, accepting)  # a later attempt is valid
    near.close()
    writer.close()
    assert "its first record has no pipe" in caplog.text
    assert len(accepting.ends) == 1


@pytest.mark.parametrize("open_end", [TensorQueue.open_writer, TensorQueue.open_reader])
async def test_a_first_record_with_an_end_of_the_queue_in_place_of_a_pipe_is_refused(
    open_end: Callable[[TensorQueue], socket.socket],
    queue: TensorQueue,
    listener: QueueListener,
    accepting: Accepting,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with queue.open_writer() as writer, open_end(queue) as end:
        socket.send_fds(writer, [_HELLO + b"hello"], [end.fileno()])
        honest, near, _ = await _say_hello(queue, accepting)
    near.close()
    honest.close()
    assert "its first record has no pipe" in caplog.text
    assert len(accepting.ends) == 1


class _Failing(Accepting):
    def __init__(self) -> None:
        super().__init__()
        self.failures: asyncio.Queue[OSError] = asyncio.Queue()

    def listening_failed(self, error: OSError) -> None:
        self.failures.put_nowait(error)


async def test_records_arrive_after_all_tasks_of_the_loop_were_cancelled(
    queue: TensorQueue, listener: QueueListener, accepting: Accepting
) -> None:
    writer, near, end = await _say_hello(queue, accepting)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # as an application does that shuts down
    await turns()
    with writer, near:
        writer.send(_FRAME + b"later")
        assert await end.read() == b"later"


async def test_a_failure_to_read_the_queue_is_reported_before_the_end_of_its_senders(
    queue: TensorQueue,
) -> None:
    failing = _Failing()
    before = open_sockets()
    listener = await listen_on(queue, failing, 1 << 16)
    [reader] = open_sockets() - before
    writer, near, end = await _say_hello(queue, failing)
    no_socket = os.open(os.devnull, os.O_RDONLY)
    os.dup2(no_socket, int(reader.split()[0]))
    os.close(no_socket)
    near.close()
    assert (await failing.failures.get()).errno == errno.ENOTSOCK
    await end.was_lost.wait()
    writer.close()
    listener.close()
