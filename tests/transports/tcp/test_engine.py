"""Tensors that NIXL moves between two processes of this machine, and those for which it cannot be used."""

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Hashable
from typing import Any

import pytest
import torch

from aiotensor import TensorReceiver, TensorSender, blocking
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.engines import EngineError, RegistrationError
from aiotensor.engines.nixl import NixlEngine
from aiotensor.inspection import Inspection, inspect
from verification.descriptors import our_descriptors
from verification.patterns import pattern
from verification.places import free_port
from verification.processes import peers
from verification.processes.peers import State
from verification.promptly import allowed_s
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LARGE = 1 << 20  # elements of int64
NIXL: dict[str, Any] = {"engine": "nixl"}


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged lines about engines."""
    return [one.getMessage() for one in caplog.records if vars(one).get("event") == "nixl_unavailable"]


async def test_large_tensors_move_with_the_engine_that_both_sides_have_chosen(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        await until(lambda: receiver.statistics().engine_connections == 1)
        for seed, count in enumerate((LARGE, 1, 5 * LARGE, LARGE, 100, 3 * LARGE)):
            handle = await sender.send(pattern(seed, count))
            assert torch.equal(await receiver.receive(handle), pattern(seed, count))
        allocated = await sender.allocate((LARGE,), torch.int64)
        allocated.copy_(pattern(7, LARGE))
        for part in (allocated, allocated[LARGE // 2 :], allocated):
            assert torch.equal(await receiver.receive(await sender.send(part)), part)
        del allocated, part
        await settled(sender)
    assert not lines(caplog)


async def test_publications_move_with_the_engine(address: str) -> None:
    async with (
        Publisher(address, **NIXL) as publisher,
        Subscriber(address, torch.Tensor, **NIXL) as first,
        Subscriber(address, torch.Tensor, **NIXL) as second,
        Subscriber(address, torch.Tensor) as third,
    ):
        await until(lambda: publisher.statistics().engine_connections == 2)
        await until(lambda: publisher.statistics().subscribers == 3)
        for seed in range(3):
            await publisher.publish(pattern(seed, LARGE))
            for subscriber in (first, second, third):
                assert torch.equal((await subscriber.receive()).message, pattern(seed, LARGE))
        assert [one.statistics().engine_connections for one in (first, second, third)] == [1, 1, 0]


async def test_many_tensors_at_once_arrive_complete(address: str) -> None:
    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, 200, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        counts = [LARGE // 4 + seed for seed in range(100)]

        async def exchange(seed: int) -> bool:
            handle = await sender.send(pattern(seed, counts[seed]))
            return torch.equal(await receiver.receive(handle), pattern(seed, counts[seed]))

        assert all(await asyncio.gather(*map(exchange, range(len(counts)))))
        await settled(sender)


@pytest.mark.parametrize("chooser", ["sender", "receiver"])
async def test_zeromq_carries_all_tensors_if_only_one_side_has_chosen_an_engine(
    chooser: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    at_receiver, at_sender = (NIXL, {}) if chooser == "receiver" else ({}, NIXL)
    sender = TensorSender(address, **at_sender)
    for attempt in range(2):  # the sender connects twice, and logs it once
        async with TensorReceiver(address, **at_receiver) as receiver:
            if attempt == 0:
                await sender.__aenter__()
            await sender.ready()
            handle = await sender.send(pattern(0, LARGE))
            assert torch.equal(await receiver.receive(handle), pattern(0, LARGE))
            await until(lambda: bool(lines(caplog)))
            assert sender.statistics().engine_connections == 0
            assert receiver.statistics().engine_connections == 0
        if chooser == "receiver":
            break
    await sender.aclose()
    reason = "the peer did not choose an engine"
    assert lines(caplog) == [
        f"ZeroMQ carries all tensors of a connection at {address} instead of nixl: {reason}"
    ]


async def open_without_nixl(state: State) -> None:
    """Open a receiver where NIXL is not installed."""
    blocked: dict[str, Any] = dict.fromkeys(("nixl_cu12", "nixl_cu13"))
    sys.modules.update(blocked)
    state.others["lines"] = lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aiotensor.transports").addHandler(handler)
    state.receivers.append(await TensorReceiver(state.endpoint, engine="nixl").__aenter__())


async def lines_of(state: State) -> list[str]:
    lines: list[str] = state.others["lines"]
    return lines


async def test_zeromq_carries_all_tensors_if_nixl_is_not_installed_at_one_side(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with peers.peers(address, 1) as [engine]:
        await engine.call(open_without_nixl)
        async with TensorSender(address, **NIXL) as sender:
            await until(lambda: bool(lines(caplog)))
            handle = await sender.send(pattern(0, LARGE))
            assert await engine.call(peers.receive_pattern, handle, 0)
            assert sender.statistics().engine_connections == 0
        reason = "NIXL is not installed: pip install nixl-cu12"
        text = f"ZeroMQ carries all tensors of a connection at {address} instead of nixl: {reason}"
        assert await engine.call(lines_of) == [text] == lines(caplog)


async def test_zeromq_carries_all_tensors_if_the_engine_fails_its_test(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise EngineError("no device")

    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, **NIXL) as sender:
        monkeypatch.setattr("aiotensor.engines.nixl.NixlEngine.write", broken)
        await until(lambda: bool(lines(caplog)))
        handle = await sender.send(pattern(0, LARGE))
        assert torch.equal(await receiver.receive(handle), pattern(0, LARGE))
    assert "instead of nixl: no device" in lines(caplog)[0]


@pytest.mark.parametrize("method", ["write", "register"])
async def test_a_tensor_whose_memory_cannot_be_registered_moves_in_steps(
    method: str, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise RegistrationError("this memory cannot be registered")

    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        await until(lambda: receiver.statistics().engine_connections == 1)
        monkeypatch.setattr(f"aiotensor.engines.nixl.NixlEngine.{method}", broken)
        for seed in range(3):
            handle = await sender.send(pattern(seed, LARGE))
            assert torch.equal(await receiver.receive(handle), pattern(seed, LARGE))
        assert sender.statistics().engine_connections == 1
        await settled(sender)
    [line] = lines(caplog)
    assert line.startswith(f"ZeroMQ carries some large tensors at {address} instead of nixl: this memory")


def failing_writes(engine: NixlEngine) -> list[tuple[Hashable, str]]:
    return [(write, "the device is gone") for write, _ in poll(engine)]


def failing_engine(*_: object) -> object:
    raise EngineError("the device is gone")


poll = NixlEngine.poll


@pytest.mark.parametrize(
    ("method", "failing"),
    [
        ("poll", failing_writes),
        ("poll", failing_engine),
        ("register", failing_engine),
        ("write", failing_engine),
    ],
)
async def test_zeromq_carries_all_tensors_once_the_engine_fails(
    method: str,
    failing: object,
    address: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        await until(lambda: receiver.statistics().engine_connections == 1)
        monkeypatch.setattr(NixlEngine, method, failing)
        handles = await asyncio.gather(*(sender.send(pattern(seed, LARGE)) for seed in range(5)))
        for seed, handle in enumerate(handles):
            assert torch.equal(await receiver.receive(handle), pattern(seed, LARGE))
        assert sender.statistics().engine_connections == receiver.statistics().engine_connections == 0
        assert sender.statistics().receivers_lost == receiver.statistics().senders_lost == 0
        await settled(sender)
        monkeypatch.undo()
        async with TensorSender(address, **NIXL) as next_sender:  # each connection tests its engine again
            await until(lambda: next_sender.statistics().engine_connections == 1)
    text = f"ZeroMQ carries all tensors of a connection at {address} instead of nixl: the device is gone"
    assert lines(caplog) == [text, text]


async def test_an_engine_has_failed_if_no_write_ends(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiotensor.transports.tcp.direct.STALLED_S", 0.1)
    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        await until(lambda: receiver.statistics().engine_connections == 1)
        monkeypatch.setattr(NixlEngine, "poll", lambda *_: [])
        handle = await sender.send(pattern(0, LARGE))
        assert torch.equal(await receiver.receive(handle), pattern(0, LARGE))
        assert sender.statistics().engine_connections == receiver.statistics().engine_connections == 0
    assert "instead of nixl: no write has ended for " in lines(caplog)[0]


async def test_the_rest_of_a_failed_write_waits_until_both_engines_are_closed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the failed write could still arrive before, in memory that is used for another tensor."""
    loop, close = asyncio.get_running_loop(), NixlEngine.close
    closing: asyncio.Queue[None] = asyncio.Queue()
    may_close = threading.Semaphore(0)

    def close_late(engine: NixlEngine) -> None:
        loop.call_soon_threadsafe(closing.put_nowait, None)
        may_close.acquire()
        close(engine)

    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        await until(lambda: receiver.statistics().engine_connections == 1)
        monkeypatch.setattr(NixlEngine, "poll", failing_writes)
        monkeypatch.setattr(NixlEngine, "close", close_late)
        sending = asyncio.create_task(sender.send(pattern(0, LARGE)))
        cancelled = asyncio.create_task(sender.send(pattern(1, LARGE)))
        for _ in ("sender", "receiver"):
            await closing.get()
            cancelled.cancel()
            for seed in range(20):
                assert torch.equal(
                    await receiver.receive(await sender.send(pattern(seed, 3))), pattern(seed, 3)
                )
            assert not sending.done()
            assert sender.statistics().bytes_in_use >= 2 * 8 * LARGE
            may_close.release()
        assert torch.equal(await receiver.receive(await sending), pattern(0, LARGE))
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        await settled(sender)


async def test_an_allocated_tensor_is_not_moved_while_a_cancelled_write_of_it_is_under_way(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def poll_late(engine: NixlEngine) -> list[tuple[Hashable, str]]:
        return poll(engine) if may_end.is_set() else []

    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        await until(lambda: receiver.statistics().engine_connections == 1)
        began = asyncio.Event()
        write, loop = NixlEngine.write, asyncio.get_running_loop()

        def report(*arguments: Any) -> Hashable:
            loop.call_soon_threadsafe(began.set)
            return write(*arguments)

        monkeypatch.setattr(NixlEngine, "write", report)
        monkeypatch.setattr(NixlEngine, "poll", poll_late)
        allocated = await sender.allocate((LARGE,), torch.int64)
        allocated.fill_(1)
        sending = asyncio.create_task(sender.send(allocated))
        await began.wait()
        sending.cancel()
        await asyncio.wait([sending])
        allocated.fill_(2)
        again = [asyncio.create_task(sender.send(part)) for part in (allocated, allocated[:1000])]
        for seed in range(20):
            assert torch.equal(await receiver.receive(await sender.send(pattern(seed, 3))), pattern(seed, 3))
        assert not any(task.done() for task in again)
        may_end.set()
        for task in again:
            assert bool((await receiver.receive(await task) == 2).all())
        del allocated, sending, again, task
        await settled(sender)


async def test_a_failed_write_does_not_keep_its_engine(
    address: str, no_collections: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = our_descriptors()
    async with TensorReceiver(address, **NIXL) as receiver, TensorSender(address, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        await until(lambda: receiver.statistics().engine_connections == 1)
        register = NixlEngine.register
        monkeypatch.setattr(NixlEngine, "register", lambda *of: register(*of)[:-1])  # no key is valid
        handle = await sender.send(pattern(0, LARGE))
        assert torch.equal(await receiver.receive(handle), pattern(0, LARGE))
    await until(lambda: our_descriptors() == before)


async def test_closing_during_a_transfer_leaves_nothing_behind(address: str) -> None:
    source = torch.ones(100 << 20, dtype=torch.uint8)
    for _ in range(3):
        async with TensorReceiver(address, **NIXL), TensorSender(address, **NIXL) as sender:
            await until(lambda: sender.statistics().engine_connections == 1)
            sending = asyncio.create_task(sender.send(source))
            await until(lambda: sender.statistics().bytes_in_use > 0)
        await asyncio.wait([sending])
        sending.exception()


async def test_a_forked_child_does_not_end_a_connection_with_an_engine(address: str) -> None:
    async with peers.peers(address, 1) as [api], TensorReceiver(address, **NIXL) as receiver:
        await api.call(open_sender)
        await until(lambda: receiver.statistics().engine_connections == 1)
        assert await api.call(fork_and_wait) == 0
        handle = await api.call(send, 0)
        assert torch.equal(await receiver.receive(handle), pattern(0, LARGE))
        assert receiver.statistics().engine_connections == 1


async def open_sender(state: State) -> None:
    state.senders.append(await TensorSender(state.endpoint, engine="nixl").__aenter__())


async def send(state: State, seed: int) -> Any:
    return await state.sender.send(pattern(seed, LARGE))


async def fork_and_wait(state: State) -> int:
    """Fork a child that frees its sender, and return its status."""
    child = os.fork()
    if child == 0:
        state.senders.clear()
        gc.collect()
        os._exit(0)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    return os.waitstatus_to_exitcode(status)


def test_threads_choose_an_engine_like_tasks(address: str) -> None:
    with (
        blocking.TensorReceiver(address, engine="nixl") as receiver,
        blocking.TensorSender(address, engine="nixl") as sender,
    ):
        while not sender.statistics().engine_connections:
            pass  # each call waits for a turn of the event loop
        handle = sender.send(pattern(0, LARGE))
        assert torch.equal(receiver.receive(handle), pattern(0, LARGE))


async def test_an_inspector_needs_no_engine(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async with TensorReceiver(address, **NIXL), TensorSender(address, **NIXL) as sender:
        await until(lambda: sender.statistics().engine_connections == 1)
        found = await inspect(address, patience_s=allowed_s(5.0))
        assert isinstance(found, Inspection)
        assert found.statistics.engine_connections == 1
    assert not lines(caplog)


def test_an_unknown_engine_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"engine must be None or one of \('nixl',\), got 'rdma'"):
        TensorSender("tcp://127.0.0.1:5555", engine="rdma")  # type: ignore[arg-type]


def test_an_engine_is_rejected_on_one_machine() -> None:
    with pytest.raises(ValueError, match="tcp://"):
        TensorReceiver("unix:///nowhere/s", engine="nixl")
