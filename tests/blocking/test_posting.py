"""`post` in any thread: also where an event loop runs, but not in the thread of the sender's own loop."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from aiotensor import ClosedError, DiscardedError, UnsupportedTensorError, UsageError, WouldBlockError
from aiotensor.blocking import TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from tests.blocking.others import Other
from tests.blocking.test_sending import settled
from tests.blocking.waiting import in_thread, until
from tests.cancellation.situations import strided
from verification.internals import worker_of
from verification.patterns import BIG, pattern


@contextmanager
def held_back(sender: TensorSender) -> Iterator[None]:
    """Let the worker of a sender begin no copy in the block."""
    go_on = threading.Event()
    sender.call(worker_of(sender.inner).submit, go_on.wait)
    try:
        yield
    finally:
        go_on.set()


def _ready(sender: TensorSender, engine: Other) -> None:
    engine.call("open_receiver")
    sender.ready(timeout=20)


@pytest.mark.parametrize("count", [3, BIG], ids=["small", "large"])
def test_a_posted_tensor_arrives_as_it_was(count: int, engine: Other, endpoint: Endpoint) -> None:
    with TensorSender(endpoint) as sender:
        _ready(sender, engine)
        tensor = pattern(1, count)
        handle = sender.post(tensor)
        sender.copied(handle)
        tensor.zero_()
        assert engine.call("receive_pattern", handle, 1)
        until(lambda: settled(sender))


def test_a_wait_for_a_copy_ends_after_its_timeout_and_the_copy_continues(endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver, TensorSender(endpoint) as sender:
        sender.ready(timeout=20)
        with held_back(sender):
            handle = sender.post(strided(1, BIG))
            with pytest.raises(TimeoutError):
                sender.copied(handle, timeout=0.01)
        assert torch.equal(receiver.receive(handle), pattern(1, BIG))
        with held_back(sender):
            handle = sender.post(strided(2, BIG))
            sender.discard(handle)
            with pytest.raises(DiscardedError):
                sender.copied(handle)


def test_post_may_be_called_where_an_event_loop_runs(endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver, TensorSender(endpoint, 2) as sender:
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
        until(lambda: settled(sender))


def test_threads_post_at_the_same_time(endpoint: Endpoint) -> None:
    with (
        TensorReceiver(endpoint) as receiver,
        TensorSender(endpoint, 200) as sender,
        ThreadPoolExecutor(8) as threads,
    ):
        sender.ready(timeout=20)
        handles = list(
            threads.map(lambda seed: sender.post(strided(seed, 3 if seed % 2 else BIG // 10)), range(100))
        )
        assert len({handle.message for handle in handles}) == 100
        for seed, handle in enumerate(handles):
            assert torch.equal(receiver.receive(handle), pattern(seed, handle.shape[0]))
        until(lambda: settled(sender))


def test_post_must_not_be_called_in_the_thread_of_its_own_loop(endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint), TensorSender(endpoint) as sender:
        sender.ready(timeout=20)
        with pytest.raises(UsageError, match="in the thread of its own event loop"):
            sender.call(sender.post, pattern(1, 3))
        assert sender.statistics().in_flight == 0


def test_post_where_an_event_loop_runs_raises_when_the_sender_is_not_open(endpoint: Endpoint) -> None:
    sender = TensorSender(endpoint)

    async def post() -> None:
        sender.post(pattern(1, 3))

    with pytest.raises(UsageError, match="is not open yet"):
        asyncio.run(post())
    with sender:
        pass
    with pytest.raises(ClosedError, match="was closed"):
        asyncio.run(post())


def test_closing_waits_for_the_copies_of_posted_tensors(endpoint: Endpoint) -> None:
    with TensorReceiver(endpoint) as receiver:
        with TensorSender(endpoint) as sender:
            sender.ready(timeout=20)
            with held_back(sender):
                handle = sender.post(strided(1, BIG))
                closing = in_thread(sender.close)
                until(lambda: sender.is_closed)
        closing.result()
        assert torch.equal(receiver.receive(handle), pattern(1, BIG))
