"""Senders and receivers in threads, and tensors that are posted where an event loop runs."""

import asyncio

import pytest
import torch

from aiotensor import (
    AlreadyTakenError,
    ClosedError,
    DiscardedError,
    TensorHandle,
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from aiotensor.blocking import TensorReceiver, TensorSender
from tests.blocking.waiting import Place, in_thread, until
from tests.cancellation.situations import strided
from verification.patterns import BIG, pattern


def settled(sender: TensorSender, receiver: TensorReceiver) -> bool:
    """Return whether all permits, all memory and all tensors were released."""
    sent, received = sender.statistics(), receiver.statistics()
    return (sent.in_flight, sent.bytes_in_use, sent.waiting, sent.holders) == (0, 0, 0, ()) and (
        received.leases,
        received.unclaimed_tensors,
        received.waiting,
    ) == (0, 0, 0)


def test_tensors_arrive_unchanged_in_threads_that_wait_for_them(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors) as sender:
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
    assert receiver.statistics().bytes_taken == 8 * (3 + 2 * BIG)


def test_calls_without_a_wait_return_what_is_there_or_raise(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors, 1) as sender:
        sender.ready(timeout=20)
        with pytest.raises(TimeoutError):
            receiver.next(timeout=0)
        handle = sender.send_nowait(pattern(1, BIG))
        with pytest.raises(WouldBlockError, match="no permit"):
            sender.send_nowait(pattern(2, BIG))
        receiver.arrived(handle, timeout=30)
        assert torch.equal(receiver.receive_nowait(handle), pattern(1, BIG))
        until(lambda: settled(sender, receiver))
        handle = sender.send_nowait(pattern(2, BIG))
        until(lambda: receiver.statistics().unclaimed_tensors == 1)
        assert torch.equal(receiver.next(timeout=0).tensor, pattern(2, BIG))
        sender.drain(timeout=20)
        handle = sender.send(pattern(3, BIG))
        sender.discard(handle)
        receiver.discard(handle)
        with pytest.raises(DiscardedError):
            receiver.receive(handle)


def test_a_message_of_several_tensors_has_one_permit_and_is_sent_whole_or_not_at_all(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors, 1) as sender:
        with sender.message(timeout=10) as message:
            handles = [message.send(pattern(seed, BIG), timeout=10) for seed in range(2)]
            allocated = message.allocate((BIG,), torch.int64, timeout=10)
            handles.append(message.send(allocated.copy_(pattern(2, BIG))))
            del allocated
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
        with pytest.raises(UsageError, match="already begun"), message:
            pass
        until(lambda: settled(sender, receiver))


# Posted tensors


@pytest.mark.promise(23)
def test_post_may_be_called_where_an_event_loop_runs_but_not_in_its_own(place: Place) -> None:
    sender = TensorSender(place.tensors, 2)

    async def post() -> None:
        sender.post(pattern(1, 3))

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

    with pytest.raises(UsageError, match="is not open yet"):
        asyncio.run(post())
    with TensorReceiver(place.tensors) as receiver, sender:
        sender.ready(timeout=20)
        asyncio.run(serve())
        until(lambda: settled(sender, receiver))
        with pytest.raises(UsageError, match="in the thread of its own event loop"):
            sender.call(sender.post, pattern(1, 3))
        assert sender.statistics().in_flight == 0
    with pytest.raises(ClosedError, match="was closed"):
        asyncio.run(post())
