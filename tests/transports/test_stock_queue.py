"""Connections over a stock queue: how they begin and end, the chunks on it, and objects that are none."""

import asyncio
import contextlib
import errno
import multiprocessing
import os
import pickle
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import pytest
import torch.multiprocessing
import torch.multiprocessing.queue

from aiotensor.errors import AccessDeniedError, PeerLostError, UsageError
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports import users
from aiotensor.transports.stock import connector as connectors
from aiotensor.transports.stock.connector import StockConnector
from aiotensor.transports.stock.ends import address_of, new_socket
from aiotensor.transports.stock.listener import StockListener, listen_on
from aiotensor.transports.stock.pipe import (
    CONNECTION_BYTES,
    MAX_DATA_BYTES,
    ChunkReader,
    Kind,
    StockQueue,
    encode_chunk,
    open_reader,
    open_writer,
)
from tests.transports.ends import End, fill, turns
from tests.transports.parties import Accepting, Connecting
from tests.transports.unix_ends import in_child, no_descriptors
from verification.waiting import until

_MAX_RECORD_BYTES = 1 << 16

_SPAWN = multiprocessing.get_context("spawn")


class _Failing(Accepting):
    """The owner of a listener that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: asyncio.Queue[OSError] = asyncio.Queue()

    def listening_failed(self, error: OSError) -> None:
        self.failures.put_nowait(error)


class _BareSender:
    """A sender that writes any chunks.

    Attributes:
        end: its accepted end.
        sock: its end of the socket.
    """

    def __init__(self, queue: StockQueue, name: bytes, sock: socket.socket, end: End) -> None:
        self.end = end
        self.sock = sock
        self._name = name
        self._queue = open_writer(queue)

    def say(self, number: int, data: bytes, kind: bytes = Kind.LAST) -> None:
        self.write(encode_chunk(kind, self._name, number, data))

    def write(self, data: bytes) -> None:
        assert os.write(self._queue.number, data) == len(data)

    def close(self) -> None:
        self.sock.close()
        self._queue.close()


@pytest.fixture
def queue() -> Iterator[StockQueue]:
    queue: StockQueue = _SPAWN.Queue()
    yield queue
    queue.close()
    queue.join_thread()


@pytest.fixture
async def accepting() -> AsyncIterator[_Failing]:
    accepting = _Failing()
    yield accepting
    accepting.close()


@pytest.fixture
async def listener(queue: StockQueue, accepting: _Failing) -> AsyncIterator[StockListener]:
    listener = await listen_on(queue, accepting, _MAX_RECORD_BYTES)
    yield listener
    listener.close()


@pytest.fixture
async def connecting(queue: StockQueue) -> AsyncIterator[Connecting]:
    connecting = Connecting(lambda events: StockConnector(queue, events))
    yield connecting
    connecting.close()


@contextlib.asynccontextmanager
async def _bare_sender(queue: StockQueue, accepting: Accepting) -> AsyncIterator[_BareSender]:
    name = secrets.token_bytes(CONNECTION_BYTES)
    with new_socket() as door:
        door.bind(address_of(name))
        door.listen()
        with contextlib.closing(open_writer(queue)) as writer:
            os.write(writer.number, encode_chunk(Kind.CONNECT, name, 0, b""))
        end = await accepting.accepted.get()
        sock, _ = door.accept()
    with contextlib.closing(_BareSender(queue, name, sock, end)) as sender:
        yield sender


@contextlib.contextmanager
def _reading(queue: StockQueue) -> Iterator[ChunkReader]:
    with contextlib.closing(ChunkReader(open_reader(queue))) as reader:
        yield reader


def _clog(queue: StockQueue) -> None:
    """Fill the pipe with chunks of no connection."""
    with contextlib.closing(open_writer(queue)) as writer, contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer.number, encode_chunk(Kind.LAST, bytes(CONNECTION_BYTES), 0, b""))


# How a connection begins


async def test_a_sender_names_an_address_on_the_queue_and_the_receiver_connects_to_it(
    queue: StockQueue, connecting: Connecting
) -> None:
    connecting.connector.connect()
    with _reading(queue) as reader, new_socket() as sock:
        request = reader.read()
        assert request is not None
        assert (request.kind, bytes(request.data)) == (Kind.CONNECT, b"")
        assert not connecting.connections
        sock.connect(address_of(request.connection))
        end = await connecting.next_connection.get()
        first = reader.read()
        assert first is not None
        assert (first.kind, first.number, bytes(first.data)) == (Kind.LAST, 0, b"introduction 1")
        assert first.connection == request.connection
        sock.send(b"through the socket")
        assert await end.read() == b"through the socket"
        assert end.transport.peer_pid == os.getpid()
        with new_socket() as another, pytest.raises(ConnectionRefusedError):
            another.connect(address_of(request.connection))
    await end.was_lost.wait()


async def test_a_connection_request_lost_with_a_receiver_is_repeated(
    queue: StockQueue, accepting: _Failing, connecting: Connecting
) -> None:
    connecting.connector.connect()
    with _reading(queue) as reader:
        assert reader.read() is not None
    listener = await listen_on(queue, accepting, _MAX_RECORD_BYTES)
    assert await (await accepting.accepted.get()).read() == b"introduction 1"
    listener.close()


async def test_a_request_is_made_once_while_no_receiver_reads(
    queue: StockQueue, connecting: Connecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connectors, "_ASK_AGAIN_S", 0.001)
    connecting.connector.connect()
    await asyncio.sleep(0.05)
    with _reading(queue) as reader:
        assert reader.read() is not None
        assert reader.read() is None


async def test_a_request_of_a_sender_that_is_gone_is_ignored(
    queue: StockQueue, accepting: _Failing, connecting: Connecting, listener: StockListener
) -> None:
    connecting.connector.connect()
    connecting.connector.close()
    async with _bare_sender(queue, accepting):
        assert len(accepting.ends) == 1


async def test_a_sender_that_asks_twice_is_connected_once(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    async with _bare_sender(queue, accepting) as sender:
        sender.say(0, b"", Kind.CONNECT)
        sender.say(0, b"record")
        assert await sender.end.read() == b"record"
    assert len(accepting.ends) == 1


async def test_a_sender_waits_for_a_receiver_of_its_user(
    listener: StockListener, accepting: _Failing, connecting: Connecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, refused = users.check_user, list[int]()

    def refuse_once(sock: socket.socket) -> int:
        if not refused:
            refused.append(check(sock))
            raise AccessDeniedError("the other side runs as another user")
        return check(sock)

    monkeypatch.setattr(connectors, "check_user", refuse_once)
    connecting.connector.connect()
    first = await accepting.accepted.get()
    await first.was_lost.wait()
    assert not connecting.connections
    assert refused
    assert await (await accepting.accepted.get()).read() == b"introduction 1"


async def test_a_connection_is_made_once_descriptors_are_available() -> None:
    assert await in_child(_meet_without_descriptors, "receiver") == ["answering_failed", "introduction 1"]
    assert await in_child(_meet_without_descriptors, "sender") == ["connecting_failed", "introduction 1"]


def _meet_without_descriptors(side: str) -> list[str]:
    return asyncio.run(_meet(side))


async def _meet(side: str) -> list[str]:
    import logging

    events: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: events.append(vars(record)["event"])  # type: ignore[method-assign]
    logging.getLogger("aiotensor.transports").addHandler(handler)
    queue: StockQueue = _SPAWN.Queue()
    accepting = Accepting()
    connecting = Connecting(lambda events: StockConnector(queue, events))
    connecting.connector.connect()
    listener = await listen_on(queue, accepting, _MAX_RECORD_BYTES)
    if side == "receiver":
        with no_descriptors():
            await until(lambda: bool(events))
    else:
        while not accepting.ends:
            listener._read()
        with no_descriptors():
            await until(lambda: bool(events))
    record = await (await accepting.accepted.get()).read()
    connecting.close()
    accepting.close()
    listener.close()
    return [*events[:1], record.decode()]


async def test_a_connection_whose_owner_fails_is_closed_and_made_again(
    listener: StockListener, accepting: _Failing, connecting: Connecting
) -> None:
    connecting.error = OSError("no memory")
    connecting.connector.connect()
    await (await accepting.accepted.get()).was_lost.wait()
    connecting.error = None
    assert await (await accepting.accepted.get()).read() == b"introduction 2"


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_queue_that_no_process_can_read_is_a_permanent_failure(
    is_full: bool, queue: Any, connecting: Connecting
) -> None:
    if is_full:
        _clog(queue)
    connecting.connector.connect()
    queue._reader.close()
    assert isinstance(await connecting.failures.get(), PeerLostError)


# Opening a queue


async def test_a_queue_has_one_receiver(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    with pytest.raises(UsageError, match="already has a receiver"):
        await listen_on(queue, accepting, _MAX_RECORD_BYTES)
    listener.close()
    (await listen_on(queue, accepting, _MAX_RECORD_BYTES)).close()


async def test_a_queue_that_a_process_reads_by_get_cannot_have_a_receiver(
    queue: Any, accepting: _Failing
) -> None:
    getting = threading.Thread(target=queue.get)
    getting.start()
    await until(lambda: queue._rlock._semlock._is_zero())
    with pytest.raises(UsageError, match="the method `get`"):
        await listen_on(queue, accepting, _MAX_RECORD_BYTES)
    queue.put(None)
    await asyncio.to_thread(getting.join)
    (await listen_on(queue, accepting, _MAX_RECORD_BYTES)).close()


async def test_a_queue_that_was_closed_cannot_be_used(queue: StockQueue, connecting: Connecting) -> None:
    queue.close()
    with pytest.raises(UsageError, match="was closed"):
        connecting.connector.connect()
    with pytest.raises(UsageError, match="was closed"):
        await listen_on(queue, Accepting(), _MAX_RECORD_BYTES)


@pytest.mark.parametrize(
    "make",
    [
        torch.multiprocessing.get_context("spawn").Queue,
        partial(torch.multiprocessing.queue.Queue, ctx=_SPAWN),
        _SPAWN.JoinableQueue,
        multiprocessing.get_context("fork").Queue,
        multiprocessing.get_context("forkserver").Queue,
    ],
    ids=["torch", "class of torch", "joinable", "fork", "forkserver"],
)
async def test_every_queue_of_multiprocessing_and_of_torch_can_be_used(
    make: Callable[[], StockQueue], accepting: _Failing
) -> None:
    queue = make()
    connecting = Connecting(lambda events: StockConnector(queue, events))
    listener = await listen_on(queue, accepting, _MAX_RECORD_BYTES)
    connecting.connector.connect()
    assert await (await accepting.accepted.get()).read() == b"introduction 1"
    connecting.close()
    listener.close()
    queue.close()


async def test_the_queue_itself_stays_in_blocking_mode_and_none_of_its_locks_is_used(
    queue: Any, listener: StockListener, accepting: _Failing, connecting: Connecting
) -> None:
    with queue._wlock, queue._rlock:
        connecting.connector.connect()
        assert await (await accepting.accepted.get()).read() == b"introduction 1"
    assert os.get_blocking(queue._reader.fileno())
    assert os.get_blocking(queue._writer.fileno())


# Records


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 15])
@pytest.mark.parametrize("more", [-1, 0, 1])
async def test_records_of_any_length_arrive(
    parts: int, more: int, listener: StockListener, accepting: _Failing, connecting: Connecting
) -> None:
    record = secrets.token_bytes(max(parts * MAX_DATA_BYTES + more, 0))
    connecting.connector.connect()
    near = await connecting.next_connection.get()
    near.transport.write(record)
    near.transport.write(b"behind it")
    far = await accepting.accepted.get()
    assert [await far.read() for _ in range(3)] == [b"introduction 1", record, b"behind it"]


async def test_parts_of_records_of_several_senders_may_alternate(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    async with _bare_sender(queue, accepting) as one, _bare_sender(queue, accepting) as other:
        one.say(0, b"one, ", Kind.PART)
        other.say(0, b"other, ", Kind.PART)
        one.say(1, b"first")
        other.say(1, b"second, ", Kind.PART)
        other.say(2, b"")
        assert await one.end.read() == b"one, first"
        assert await other.end.read() == b"other, second, "


async def test_an_oversized_record_is_truncated_to_one_byte_above_the_limit(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    async with _bare_sender(queue, accepting) as sender:
        for number in range(40):
            sender.say(number, bytes(MAX_DATA_BYTES), Kind.PART)
            await turns()
        sender.say(40, b"end")
        sender.say(41, b"next")
        assert len(await sender.end.read()) == _MAX_RECORD_BYTES + 1
        assert await sender.end.read() == b"next"


async def test_descriptors_wait_for_their_record_and_are_closed_with_the_connection(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    reading_end, writing_end = os.pipe()
    async with _bare_sender(queue, accepting) as sender:
        for _ in range(2):
            socket.send_fds(sender.sock, [b"D"], [writing_end])
        os.close(writing_end)
        await turns(10)
        sender.say(0, b"without")
        sender.say(1, b"with", Kind.CARRIER)
        assert await sender.end.read() == b"without"
        data, descriptors = await sender.end.arrived.get()
        assert (data, len(descriptors)) == (b"with", 1)
        close_all(descriptors)
    await sender.end.was_lost.wait()
    assert os.read(reading_end, 1) == b"", "the others are closed"
    os.close(reading_end)


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (lambda sender: sender.say(1, b"second"), "another process also reads the queue"),
        (lambda sender: sender.say(0, b"first", b"X"), "unknown kind b'X'"),
        (lambda sender: sender.say(0, b"with", Kind.CARRIER), "descriptors of a record are missing"),
        (lambda sender: _send_pipes(sender.sock, 17), "17 times without a record"),
    ],
    ids=["a missing chunk", "an unknown kind", "no descriptors", "descriptors without records"],
)
async def test_a_violation_of_a_sender_closes_only_its_own_connection(
    say: Callable[[_BareSender], None],
    reason: str,
    queue: StockQueue,
    listener: StockListener,
    accepting: _Failing,
) -> None:
    async with _bare_sender(queue, accepting) as sender, _bare_sender(queue, accepting) as other:
        say(sender)
        await sender.end.was_lost.wait()
        assert reason in sender.end.lost[0]
        sender.say(0, b"ignored")
        other.say(0, b"read")
        assert await other.end.read() == b"read"
        assert sender.end.arrived.empty()


def _send_pipes(sock: socket.socket, count: int) -> None:
    for _ in range(count):
        socket.send_fds(sock, [b"D"], [0])


async def test_the_end_of_a_sender_is_reported_while_other_senders_keep_writing(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    async with _bare_sender(queue, accepting) as other:
        async with _bare_sender(queue, accepting) as sender:
            for number in range(20):
                sender.say(number, bytes([number]))
                other.say(number, b"of the other")
        written = 20
        while not sender.end.lost:
            other.say(written, b"of the other")
            written += 1
            await asyncio.sleep(0)
        assert [await sender.end.read() for _ in range(20)] == [bytes([n]) for n in range(20)]
        assert sender.end.lost == ["the peer closed the connection"]
        assert other.end.arrived.qsize() < written


async def test_a_part_of_a_record_is_dropped_with_its_sender(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    async with _bare_sender(queue, accepting) as sender:
        sender.say(0, b"the first half", Kind.PART)
    await sender.end.was_lost.wait()
    assert sender.end.arrived.empty()


async def test_the_next_receiver_ignores_the_records_for_an_earlier_one(
    queue: StockQueue, accepting: _Failing
) -> None:
    listener = await listen_on(queue, accepting, _MAX_RECORD_BYTES)
    async with _bare_sender(queue, accepting) as sender:
        sender.say(0, b"read")
        assert await sender.end.read() == b"read"
        listener.close()
        sender.say(1, b"for the earlier one", Kind.PART)
        listener = await listen_on(queue, accepting, _MAX_RECORD_BYTES)
        async with _bare_sender(queue, accepting) as later:
            later.say(0, b"for the later one")
            assert await later.end.read() == b"for the later one"
        assert sender.end.arrived.empty()
    listener.close()


async def test_a_connection_ends_if_the_kernel_refuses_to_write(
    listener: StockListener, accepting: _Failing, connecting: Connecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "no memory")

    connecting.connector.connect()
    near, far = await connecting.next_connection.get(), await accepting.accepted.get()
    assert await far.read() == b"introduction 1"
    monkeypatch.setattr(os, "write", refuse)
    near.transport.write(bytes(2 * MAX_DATA_BYTES))
    assert near.lost == []
    await near.was_lost.wait()
    monkeypatch.undo()
    assert near.lost == ["writing failed: [Errno 12] no memory"]
    await far.was_lost.wait()
    assert far.arrived.empty()


async def test_the_last_records_of_a_receiver_arrive_although_no_process_can_read_the_queue(
    queue: Any, listener: StockListener, accepting: _Failing, connecting: Connecting
) -> None:
    connecting.connector.connect()
    near, far = await connecting.next_connection.get(), await accepting.accepted.get()
    fill(near.transport)
    queue._reader.close()
    listener.close()
    await near.resumed.wait()
    near.transport.write(b"to nobody")
    await turns()
    assert near.lost == []
    far.transport.write(b"last")
    far.transport.close()
    assert await near.read() == b"last"
    await near.was_lost.wait()


async def test_records_arrive_after_all_tasks_of_the_loop_were_cancelled(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    async with _bare_sender(queue, accepting) as sender:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # as an application does that shuts down
        await turns()
        sender.say(0, b"later")
        assert await sender.end.read() == b"later"


# Objects of the application


class _Evil:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return os.abort, ()


@pytest.mark.parametrize(
    "put", [None, b"bytes", _Evil(), bytes(4000)], ids=["None", "bytes", "evil", "as long as possible"]
)
async def test_a_small_object_of_the_application_is_logged_and_ignored_and_never_unpickled(
    put: object,
    queue: StockQueue,
    listener: StockListener,
    accepting: _Failing,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _bare_sender(queue, accepting) as sender:
        sender.say(0, b"before")
        queue.put(put)
        await until(lambda: "an object that the application put on the queue was ignored" in caplog.text)
        sender.say(1, b"after")
        assert await sender.end.read() == b"before"
        assert await sender.end.read() == b"after"
        assert accepting.failures.empty()


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(b"\xff\xff\xff\xff" + (1 << 32).to_bytes(8), id="an object of gigabytes"),
        pytest.param((1 << 20).to_bytes(4) + bytes(100), id="a part of an object"),
        pytest.param((100).to_bytes(4) + bytes(99), id="a part of a small object"),
        pytest.param(b"\0", id="a part of a length"),
    ],
)
async def test_an_object_that_was_not_written_in_one_piece_ends_all_connections(
    written: bytes, queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    async with _bare_sender(queue, accepting) as one, _bare_sender(queue, accepting) as other:
        one.say(0, b"before")
        one.write(written)
        error = await accepting.failures.get()
        assert error.errno == errno.EBADMSG
        assert "not written in one piece" in str(error)
        assert await one.end.read() == b"before"
        for sender in (one, other):
            assert "reading the queue failed" in sender.end.lost[0]
            assert sender.end.transport.is_closed


async def test_a_large_object_of_the_application_ends_all_connections(
    queue: StockQueue, listener: StockListener, accepting: _Failing
) -> None:
    async with _bare_sender(queue, accepting) as sender:
        queue.put(bytes(10_000))
        assert (await accepting.failures.get()).errno == errno.EBADMSG
        assert sender.end.transport.is_closed


def test_a_process_that_gets_a_chunk_cannot_unpickle_it(queue: StockQueue) -> None:
    chunk = encode_chunk(Kind.LAST, bytes(CONNECTION_BYTES), 0, pickle.dumps(_Evil()))
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(chunk[4:])  # behind the length
    with contextlib.closing(open_writer(queue)) as writer:
        os.write(writer.number, chunk)
    with pytest.raises(ValueError, match="released too many times"):
        queue.get(timeout=20)
