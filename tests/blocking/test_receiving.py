"""A receiver in a thread, and a sender in another process: over each link, with either API."""

import itertools

import pytest
import torch

from aiotensor import (
    AlreadyTakenError,
    Delivery,
    DiscardedError,
    PeerLostError,
    TensorHandle,
    WouldBlockError,
)
from aiotensor.blocking import TensorReceiver
from aiotensor.transports.endpoints import Endpoint
from tests.blocking.others import Other
from tests.blocking.waiting import in_thread, until
from tests.pairs import beyond
from verification.patterns import BIG, pattern


def settled(receiver: TensorReceiver) -> bool:
    """Return whether the receiver holds no tensors."""
    seen = receiver.statistics()
    return (seen.leases, seen.leased_bytes, seen.unclaimed_tensors, seen.waiting) == (0, 0, 0, 0)


@pytest.mark.parametrize("count", [3, BIG], ids=["small", "large"])
@pytest.mark.parametrize("copy", [False, True], ids=["view", "copy"])
def test_a_received_tensor_equals_the_sent_one(
    count: int, copy: bool, engine: Other, endpoint: Endpoint
) -> None:
    with TensorReceiver(endpoint) as receiver:
        name = engine.call("open_sender")
        handle = TensorHandle(name, 0, 0, "int64", (count,), "cpu")
        receiving = in_thread(lambda: receiver.receive(handle, copy=copy))  # before it is sent
        until(lambda: receiver.statistics().waiting == 1)
        assert engine.call("send_pattern", 1, count) == handle
        tensor = receiving.result()
        del receiving
        assert torch.equal(tensor, pattern(1, count))
        engine.call("drain")
        assert receiver.statistics().leases == (count == BIG and not copy)
        with pytest.raises(AlreadyTakenError):
            receiver.receive(handle)
        del tensor
        until(lambda: settled(receiver))
        assert receiver.statistics().senders == 1
    seen = receiver.statistics()
    assert (seen.tensors_taken, seen.bytes_taken) == (1, 8 * count)


def test_a_received_tensor_outlives_its_receiver_and_the_loop(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        engine.call("open_sender")
        tensor = receiver.receive(engine.call("send_pattern", 1, BIG))
    engine.call("close_sender")
    assert torch.equal(tensor, pattern(1, BIG))


def test_receive_nowait_returns_only_tensors_that_have_arrived(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        engine.call("open_sender")
        handle = engine.call("send_pattern", 1, BIG)
        receiver.arrived(handle)
        assert torch.equal(receiver.receive_nowait(handle), pattern(1, BIG))
        with pytest.raises(WouldBlockError, match="has not arrived"):
            receiver.receive_nowait(beyond(handle))
        until(lambda: settled(receiver))


def test_arrived_waits_without_taking_the_tensor(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        name = engine.call("open_sender")
        handle = TensorHandle(name, 0, 0, "int64", (BIG,), "cpu")
        arriving = in_thread(lambda: receiver.arrived(handle, timeout=30))
        until(lambda: receiver.statistics().waiting == 1)
        engine.call("send_pattern", 1, BIG)
        arriving.result()
        assert receiver.statistics().unclaimed_tensors == 1
        assert torch.equal(receiver.receive(handle), pattern(1, BIG))


def test_a_tensor_can_be_received_after_a_timeout(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        name = engine.call("open_sender", 1)
        handle = TensorHandle(name, 0, 0, "int64", (BIG,), "cpu")
        for call in (receiver.receive, receiver.arrived):
            with pytest.raises(TimeoutError):
                call(handle, timeout=0.02)
        with pytest.raises(TimeoutError):
            receiver.next(timeout=0.02)
        assert receiver.statistics().waiting == 0
        engine.call("send_pattern", 1, BIG)
        assert torch.equal(receiver.receive(handle, timeout=30), pattern(1, BIG))
        engine.call("drain")


def test_iterating_gives_tensors_in_the_order_of_their_arrival(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        engine.call("open_sender")
        handles = [engine.call("send_pattern", seed, BIG) for seed in range(4)]
        for seed, delivery in enumerate(receiver):
            assert delivery.handle == handles[seed]
            assert torch.equal(delivery.tensor, pattern(seed, BIG))
            if delivery.handle == handles[-1]:
                break
        del delivery
        engine.call("drain")
        until(lambda: settled(receiver))


def test_several_threads_iterate_over_one_receiver_until_it_is_closed(
    engine: Other, endpoint: Endpoint
) -> None:
    with TensorReceiver(endpoint) as receiver:

        def take() -> list[int]:
            return [delivery.handle.message for delivery in receiver]

        taking = [in_thread(take) for _ in range(3)]
        engine.call("open_sender")
        for seed in range(20):
            engine.call("send_pattern", seed, 3)
        engine.call("drain")
    taken = [one.result() for one in taking]
    assert sorted(itertools.chain(*taken)) == list(range(20))
    assert all(one == sorted(one) for one in taken)


def test_next_with_timeout_zero_returns_only_tensors_that_have_arrived(
    engine: Other, endpoint: Endpoint
) -> None:
    with TensorReceiver(endpoint) as receiver:
        with pytest.raises(TimeoutError):
            receiver.next(timeout=0)
        engine.call("open_sender")
        for seed in range(3):
            engine.call("send_pattern", seed, BIG)
        until(lambda: receiver.statistics().unclaimed_tensors == 3)
        for seed in range(3):
            delivery = receiver.next(timeout=0)
            assert isinstance(delivery, Delivery)
            assert torch.equal(delivery.tensor, pattern(seed, BIG))
        with pytest.raises(TimeoutError):
            receiver.next(timeout=0)


def test_a_message_arrives_whole(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        engine.call("open_sender")
        handles = engine.call("send_message", 5, [3, BIG])
        for seed, handle in reversed(list(enumerate(handles, 5))):
            assert torch.equal(receiver.receive(handle), pattern(seed, handle.shape[0]))
        engine.call("drain")


def test_discarding_a_tensor_releases_the_permit_of_its_sender(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        engine.call("open_sender", 1)
        handle = engine.call("send_pattern", 1, BIG)
        receiver.arrived(handle)
        receiver.discard(handle)
        assert receiver.statistics().messages_discarded == 1
        with pytest.raises(DiscardedError):
            receiver.receive(handle)
        assert torch.equal(receiver.receive(engine.call("send_pattern", 2, BIG)), pattern(2, BIG))
        until(lambda: settled(receiver))


def test_a_killed_sender_raises_peer_lost_error(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        engine.call("open_sender")
        handle = beyond(engine.call("send_pattern", 1, BIG))
        receiving = in_thread(lambda: receiver.receive(handle))
        until(lambda: receiver.statistics().waiting == 1)
        pid = engine.pid
        engine.kill()
        error = receiving.exception()
        assert isinstance(error, PeerLostError)
        assert error.pid == pid
        assert receiver.statistics().senders_lost == 1


def test_freeing_the_last_view_releases_the_memory_of_the_sender(engine: Other, endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        engine.call("open_sender", 8, 8 * BIG)  # memory for one
        for seed in range(5):
            tensor = receiver.receive(engine.call("send_pattern", seed, BIG))
            view = tensor[1:]
            del tensor
            assert int(view[0]) == 31 + seed
            del view
        until(lambda: settled(receiver))
