"""A sender in a thread, and a receiver in another process: over each link, with either API."""

import os
import threading
from functools import partial

import numpy as np
import pytest
import torch

import aiotensor
from aiotensor import (
    DiscardedError,
    PeerLostError,
    TensorHandle,
    TooLargeError,
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from aiotensor.blocking import TensorSender
from aiotensor.transports.endpoints import Endpoint
from tests.blocking.others import Other
from tests.blocking.waiting import in_thread, running, until
from verification.patterns import BIG, pattern


def settled(sender: TensorSender) -> bool:
    """Return whether all permits and all memory were released."""
    seen = sender.statistics()
    return (seen.in_flight, seen.bytes_in_use, seen.waiting, seen.holders) == (0, 0, 0, ())


@pytest.mark.parametrize("count", [3, BIG], ids=["small", "large"])
def test_a_sent_tensor_arrives_unchanged(count: int, engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint) as sender:
        before = sender.receiver_id
        engine.call("open_receiver")
        tensor = pattern(1, count)
        handle = sender.send(tensor)
        tensor.zero_()  # it was copied
        assert (handle.sender, handle.shape, handle.dtype) == (sender.id, (count,), "int64")
        assert sender.statistics().in_flight == 1
        assert engine.call("receive_pattern", handle, 1)
        until(lambda: settled(sender))
        assert before is None
        assert sender.receiver_id
        assert engine.call("receive_pattern", sender.send(pattern(2, count).numpy()), 2)
        until(lambda: settled(sender))
    seen = sender.statistics()
    assert (seen.messages_sent, seen.tensors_sent, seen.bytes_sent) == (2, 2, 2 * 8 * count)


def test_send_nowait_sends_or_raises_would_block_error(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint, 1) as sender:
        engine.call("open_receiver")
        assert engine.call("receive_pattern", sender.send(pattern(0, 3)), 0)
        until(lambda: settled(sender))
        handle = sender.send_nowait(pattern(1, BIG))
        with pytest.raises(WouldBlockError, match="no permit") as caught:
            sender.send_nowait(pattern(2, BIG))
        assert (caught.value.messages.limit, caught.value.messages.in_use) == (1, 1)
        assert engine.call("receive_pattern", handle, 1)
        until(lambda: settled(sender))


def test_a_message_of_several_tensors_has_one_permit(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint, 2) as sender:
        engine.call("open_receiver")
        with sender.message(timeout=10) as message:
            handles = [message.send(pattern(seed, BIG), timeout=10) for seed in range(3)]
            assert sender.statistics().in_flight == 1
        assert [handle.tensor for handle in handles] == [0, 1, 2]
        assert all(engine.call("receive_pattern", handle, seed) for seed, handle in enumerate(handles))
        until(lambda: settled(sender))


def test_a_message_whose_block_fails_does_not_arrive(engine: Other, endpoint: Endpoint) -> None:
    handles = []
    with TensorSender(endpoint, 1) as sender:
        engine.call("open_receiver")
        with pytest.raises(KeyError), sender.message() as message:
            handles.append(message.send(pattern(0, BIG)))
            raise KeyError
        with pytest.raises(DiscardedError):
            engine.call("receive_pattern", handles[0], 0)
        until(lambda: settled(sender))
        assert sender.statistics().messages_discarded == 1


def test_finish_completes_a_message_inside_its_block(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint, 1) as sender:
        engine.call("open_receiver")
        with sender.message() as message:
            handle = message.send(pattern(3, BIG))
            message.finish()
            assert engine.call("receive_pattern", handle, 3)
            until(lambda: settled(sender))
            with pytest.raises(DiscardedError):
                message.send(pattern(4, 3))
        with pytest.raises(UsageError, match="already begun"), message:
            pass
    assert sender.statistics().messages_discarded == 0


def test_an_allocated_tensor_is_not_copied(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint, arena_bytes=8 * BIG) as sender:
        engine.call("open_receiver")
        tensor = sender.allocate((BIG,), torch.int64)
        assert sender.statistics().bytes_in_use == 8 * BIG
        tensor.copy_(pattern(5, BIG))
        handle = sender.send(tensor)  # there is no memory for a copy of it
        assert engine.call("receive_pattern", handle, 5)
        assert sender.statistics().bytes_in_use == 8 * BIG
        del tensor
        until(lambda: settled(sender))


@pytest.mark.parametrize("by_message", [True, False], ids=["message.allocate", "sender.allocate"])
def test_a_deadlock_of_two_threads_over_memory_raises_would_block_error(
    by_message: bool, engine: Other, endpoint: Endpoint
) -> None:
    def allocate_twice(sender: TensorSender, both: threading.Barrier) -> str:
        try:
            with sender.message() as message:
                allocate = message.allocate if by_message else sender.allocate
                message.send(allocate((4 * BIG,), torch.int64))
                both.wait()
                message.send(allocate((4 * BIG,), torch.int64))
        except WouldBlockError as error:
            return str(error)
        return "sent"

    with TensorSender(endpoint, arena_bytes=10 * 8 * BIG) as sender:
        engine.call("open_receiver")
        both = threading.Barrier(2)
        threads = [in_thread(partial(allocate_twice, sender, both)) for _ in range(2)]
        refused, sent = sorted(thread.result() for thread in threads)
        assert "so the wait would never end" in refused
        assert sent == "sent"
        sender.discard_all()
        until(lambda: settled(sender))


def test_an_allocated_tensor_outlives_its_sender(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint) as sender:
        tensor = sender.allocate((2, BIG), torch.uint8)
        tensor.fill_(7)
    assert int(tensor.sum()) == 2 * 7 * BIG


def test_discarding_a_message_releases_its_permit(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint, 1) as sender:
        engine.call("open_receiver")
        handle = sender.send(pattern(1, BIG))
        sender.discard(handle)
        assert sender.statistics().in_flight == 0
        assert engine.call("receive_pattern", sender.send(pattern(2, BIG)), 2)
        with pytest.raises(DiscardedError):
            engine.call("receive_pattern", handle, 1)
        until(lambda: settled(sender))
        with pytest.raises(ValueError, match="belongs to sender"):
            sender.discard(TensorHandle("nobody", 0, 0, "int64", (1,), "cpu"))


def test_drain_waits_until_all_is_taken(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint) as sender:
        engine.call("open_receiver")
        handles = [sender.send(pattern(seed, 3)) for seed in range(2)]
        draining = in_thread(sender.drain)
        assert engine.call("receive_pattern", handles[0], 0)
        until(lambda: sender.statistics().in_flight == 1)
        assert not draining.done()
        assert engine.call("receive_pattern", handles[1], 1)
        draining.result()
        assert sender.statistics().in_flight == 0


def test_a_sent_tensor_can_be_received_after_closing(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint) as sender:
        engine.call("open_receiver")
        handle = sender.send(pattern(6, BIG))
    sender.close()  # again does nothing
    assert engine.call("receive_pattern", handle, 6)


def test_a_killed_receiver_raises_peer_lost_error(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint, 1) as sender:
        engine.call("open_receiver")
        assert engine.call("receive_pattern", sender.send(pattern(0, 3)), 0)  # they have met
        sender.send(pattern(1, BIG))
        sending = in_thread(lambda: sender.send(pattern(2, BIG)))
        with running(aiotensor.TensorSender, "drain") as drains:
            draining = in_thread(sender.drain)
            until(lambda: sender.statistics().waiting == 1 and drains.count)
        pid = engine.pid
        if isinstance(endpoint, str) and endpoint.startswith("unix"):
            os.unlink(endpoint.removeprefix("unix://"))  # no peer connects to a process that exits
        engine.kill()
        for waiting in (draining, sending):
            error = waiting.exception()
            assert isinstance(error, PeerLostError)
            assert error.pid == pid
        until(lambda: settled(sender))
        assert sender.statistics().receivers_lost == 1


def test_a_failed_call_does_not_affect_the_sender(engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint, 1) as sender:
        engine.call("open_receiver")
        with pytest.raises(UnsupportedTensorError):
            sender.send(torch.empty(3, device="meta"))
        with pytest.raises(ValueError, match="not be negative"):
            sender.allocate((-1,), torch.int64)
        with pytest.raises(TooLargeError):
            sender.allocate((0, 2**63), torch.int64)
        with sender.message() as message, pytest.raises(TooLargeError):
            message.allocate((0, 2**62, 2**62), torch.int64)
        with pytest.raises(TypeError):
            sender.send("no tensor")  # type: ignore[arg-type]
        assert settled(sender)
        assert engine.call("receive_pattern", sender.send(np.asarray(pattern(1, 3))), 1)
