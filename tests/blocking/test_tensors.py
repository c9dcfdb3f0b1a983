"""Senders and receivers in threads: each method does what its asynchronous twin does."""

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import aiotensor
from aiotensor import (
    AlreadyTakenError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    TensorHandle,
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from aiotensor.blocking import TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from tests.blocking.fork_server import ForkServer
from tests.blocking.waiting import in_thread, running, until
from tests.cancellation.situations import strided
from tests.channel.parties import Place
from tests.pairs import beyond
from verification.internals import worker_of
from verification.patterns import BIG, pattern


def settled(sender: TensorSender, receiver: TensorReceiver) -> bool:
    """Return whether all permits, all memory and all tensors were released."""
    sent, received = sender.statistics(), receiver.statistics()
    return (sent.in_flight, sent.bytes_in_use, sent.waiting, sent.holders) == (0, 0, 0, ()) and (
        received.leases,
        received.unclaimed_tensors,
        received.waiting,
    ) == (0, 0, 0)


def test_tensors_arrive_unchanged_in_threads_that_wait_for_them(endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver, TensorSender(endpoint) as sender:
        for number, (count, copy) in enumerate(((3, False), (BIG, False), (BIG, True))):
            handle = TensorHandle(sender.id, number, 0, "int64", (count,), "cpu")
            receiving = in_thread(lambda: receiver.receive(handle, copy=copy))  # noqa: B023
            until(lambda: receiver.statistics().waiting == 1)
            source = pattern(number, count)
            assert sender.send(source) == handle
            source.zero_()  # it was copied
            received = receiving.result()
            del receiving
            assert torch.equal(received, pattern(number, count))
            with pytest.raises(AlreadyTakenError):
                receiver.receive(handle)
            del received
            until(lambda: settled(sender, receiver))
        assert sender.receiver_id
        array = pattern(3, BIG).numpy()
        assert torch.equal(receiver.receive(sender.send(array)), pattern(3, BIG))
    assert (sender.statistics().tensors_sent, receiver.statistics().tensors_taken) == (4, 4)
    assert receiver.statistics().bytes_taken == 8 * (3 + 3 * BIG)


def test_calls_that_cannot_succeed_immediately_raise(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors, 1) as sender:
        sender.ready(timeout=20)
        with pytest.raises(TimeoutError):
            receiver.next(timeout=0)
        handle = sender.send_nowait(pattern(1, BIG))
        with pytest.raises(WouldBlockError, match="no permit") as caught:
            sender.send_nowait(pattern(2, BIG))
        assert (caught.value.messages.limit, caught.value.messages.in_use) == (1, 1)
        with pytest.raises(WouldBlockError, match="has not arrived"):
            receiver.receive_nowait(beyond(handle))
        for call in (receiver.receive, receiver.arrived):
            with pytest.raises(TimeoutError):
                call(beyond(handle), timeout=0.01)
        receiver.arrived(handle, timeout=30)
        assert receiver.statistics().unclaimed_tensors == 1
        assert torch.equal(receiver.receive_nowait(handle), pattern(1, BIG))
        until(lambda: settled(sender, receiver))
        sender.send_nowait(pattern(2, BIG))
        until(lambda: receiver.statistics().unclaimed_tensors == 1)
        assert torch.equal(receiver.next(timeout=0).tensor, pattern(2, BIG))


def test_a_message_of_several_tensors_has_one_permit_and_is_sent_whole_or_not_at_all(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors, 1) as sender:
        with sender.message(timeout=10) as message:
            handles = [message.send(pattern(seed, BIG), timeout=10) for seed in range(3)]
            assert sender.statistics().in_flight == 1
        for seed, handle in reversed(list(enumerate(handles))):
            assert torch.equal(receiver.receive(handle), pattern(seed, BIG))
        with pytest.raises(KeyError), sender.message() as message:
            handle = message.send(pattern(0, BIG))
            raise KeyError
        with pytest.raises(DiscardedError):
            receiver.receive(handle)
        with sender.message() as message:
            handle = message.send(pattern(3, BIG))
            message.finish()
            assert torch.equal(receiver.receive(handle), pattern(3, BIG))
            with pytest.raises(DiscardedError):
                message.send(pattern(4, 3))
        with pytest.raises(UsageError, match="already begun"), message:
            pass
        until(lambda: settled(sender, receiver))
        assert sender.statistics().messages_discarded == 1


def test_discarding_a_message_at_either_end_releases_its_permit(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors, 1) as sender:
        handle = sender.send(pattern(1, BIG))
        sender.discard(handle)
        assert sender.statistics().in_flight == 0
        with pytest.raises(DiscardedError):
            receiver.receive(handle)
        handle = sender.send(pattern(2, BIG))
        receiver.arrived(handle)
        receiver.discard(handle)
        with pytest.raises(DiscardedError):
            receiver.receive(handle)
        sender.send(pattern(3, BIG))
        assert sender.discard_all() == 1
        until(lambda: settled(sender, receiver))
        with pytest.raises(ValueError, match="belongs to sender"):
            sender.discard(TensorHandle("nobody", 0, 0, "int64", (1,), "cpu"))


def test_drain_waits_until_all_is_taken(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors) as sender:
        handles = [sender.send(pattern(seed, 3)) for seed in range(2)]
        draining = in_thread(sender.drain)
        receiver.receive(handles[0])
        until(lambda: sender.statistics().in_flight == 1)
        assert not draining.done()
        receiver.receive(handles[1])
        draining.result()
        assert sender.statistics().in_flight == 0


def test_several_threads_iterate_in_order_until_the_receiver_is_closed(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors) as sender:
        taking = [in_thread(lambda: [one.handle.message for one in receiver]) for _ in range(3)]
        for seed in range(20):
            sender.send(pattern(seed, 3))
        sender.drain()
        receiver.close()
    taken = [one.result() for one in taking]
    assert sorted(itertools.chain(*taken)) == list(range(20))
    assert all(one == sorted(one) for one in taken)


def test_a_killed_receiver_raises_peer_lost_error(fork_server: ForkServer, place: Place) -> None:
    with fork_server.program("receive", *place) as engine, TensorSender(place.tensors, 1) as sender:
        assert engine.line() == "ready"
        sender.send(pattern(0, 3))
        assert engine.line() == "0 True"
        until(lambda: not sender.statistics().in_flight)  # the permit may return after the line
        engine.stop()
        sender.send(pattern(1, BIG))
        sending = in_thread(lambda: sender.send(pattern(2, BIG)))
        with running(aiotensor.TensorSender, "drain") as drains:
            draining = in_thread(sender.drain)
            until(lambda: sender.statistics().waiting == 1 and drains.count)
        os.unlink(place.tensors.removeprefix("unix://"))  # no sender connects to a process that exits
        engine.kill()
        for waiting in (draining, sending):
            error = waiting.exception()
            assert isinstance(error, PeerLostError)
            assert error.pid == engine.pid
        until(lambda: sender.statistics().in_flight == sender.statistics().bytes_in_use == 0)
        assert sender.statistics().receivers_lost == 1


def test_a_killed_sender_raises_peer_lost_error(fork_server: ForkServer, place: Place) -> None:
    with (
        TensorReceiver(place.tensors) as receiver,
        fork_server.program("send", *place) as engine,
    ):
        handle = TensorHandle(engine.line(), 1, 0, "int64", (BIG,), "cpu")
        receiving = in_thread(lambda: receiver.receive(handle))
        until(lambda: receiver.statistics().waiting == 1)
        engine.kill()
        error = receiving.exception()
        assert isinstance(error, PeerLostError)
        assert error.pid == engine.pid
        assert receiver.statistics().senders_lost == 1


# Posted tensors


@contextmanager
def held_back(sender: TensorSender) -> Iterator[None]:
    """Let the worker of a sender begin no copy in the block."""
    go_on = threading.Event()
    sender.call(worker_of(sender.inner).submit, go_on.wait)
    try:
        yield
    finally:
        go_on.set()


def test_a_wait_for_a_copy_ends_after_its_timeout_and_the_copy_continues(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors) as sender:
        sender.ready(timeout=20)
        with held_back(sender):
            handle = sender.post(strided(1, BIG))
            with pytest.raises(TimeoutError):
                sender.copied(handle, timeout=0.01)
        sender.copied(handle)
        assert torch.equal(receiver.receive(handle), pattern(1, BIG))
        with held_back(sender):
            handle = sender.post(strided(2, BIG))
            sender.discard(handle)
            with pytest.raises(DiscardedError):
                sender.copied(handle)


@pytest.mark.promise(23)
def test_post_may_be_called_where_an_event_loop_runs_but_not_in_its_own(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors, 2) as sender:
        sender.ready(timeout=20)

        async def serve() -> None:
            handles = [sender.post(pattern(1, 3)), sender.post(strided(2, BIG))]
            with pytest.raises(WouldBlockError, match="no permit"):
                sender.post(pattern(3, 3))
            with pytest.raises(UnsupportedTensorError):
                sender.post(torch.ones(3).to_sparse())
            with pytest.raises(UsageError, match="would block the event loop"):
                sender.copied(handles[1])
            await asyncio.to_thread(sender.copied, handles[1])
            for seed, handle in enumerate(handles, 1):
                received = await asyncio.to_thread(receiver.receive, handle)
                assert torch.equal(received, pattern(seed, received.numel()))

        asyncio.run(serve())
        until(lambda: settled(sender, receiver))
        with pytest.raises(UsageError, match="in the thread of its own event loop"):
            sender.call(sender.post, pattern(1, 3))
        assert sender.statistics().in_flight == 0


def test_post_where_an_event_loop_runs_raises_when_the_sender_is_not_open(place: Place) -> None:
    sender = TensorSender(place.tensors)

    async def post() -> None:
        sender.post(pattern(1, 3))

    with pytest.raises(UsageError, match="is not open yet"):
        asyncio.run(post())
    with sender:
        pass
    with pytest.raises(ClosedError, match="was closed"):
        asyncio.run(post())


def test_threads_post_at_the_same_time(place: Place) -> None:
    with (
        TensorReceiver(place.tensors) as receiver,
        TensorSender(place.tensors, 200) as sender,
        ThreadPoolExecutor(8) as threads,
    ):
        sender.ready(timeout=20)
        handles = list(
            threads.map(lambda seed: sender.post(strided(seed, 3 if seed % 2 else BIG // 10)), range(100))
        )
        assert len({handle.message for handle in handles}) == 100
        for seed, handle in enumerate(handles):
            assert torch.equal(receiver.receive(handle), pattern(seed, handle.shape[0]))
        until(lambda: settled(sender, receiver))


def test_closing_waits_for_the_copies_of_posted_tensors(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver:
        with TensorSender(place.tensors) as sender:
            sender.ready(timeout=20)
            with held_back(sender):
                handle = sender.post(strided(1, BIG))
                closing = in_thread(sender.close)
                until(lambda: sender.is_closed)
        closing.result()
        assert torch.equal(receiver.receive(handle), pattern(1, BIG))
