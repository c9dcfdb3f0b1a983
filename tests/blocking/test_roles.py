"""Publishers, subscribers, queues and pipes between ranks, in threads."""

import functools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor import ClosedError, PeerLostError, WouldBlockError
from aiotensor.blocking import MessageQueue, Publisher, RankPipe, Subscriber
from aiotensor.queues import ConsumerStatistics
from tests.blocking.waiting import Place, in_thread
from verification.patterns import BIG, pattern
from verification.processes import peers

fork: Any = multiprocessing.get_context("fork")
forkserver: Any = peers.contexts["forkserver"]

_MAX = 2 * BIG  # elements in a pipe between ranks

# Publishers and subscribers


def test_threads_publish_and_receive(place: Place) -> None:
    with (
        Publisher(place.tensors, max_behind=2) as publisher,
        Subscriber(place.tensors, torch.Tensor) as first,
        Subscriber(place.tensors, torch.Tensor) as second,
    ):
        publisher.wait_for_subscribers(2, timeout=10)
        receiving = in_thread(lambda: [first.receive().message.sum().item() for _ in range(5)])
        iterating = in_thread(lambda: [publication.message.sum().item() for publication in second])
        for seed in range(5):
            assert publisher.publish(pattern(seed, BIG)) == (seed, 2, 0)
        publisher.drain(timeout=10)
        expected = [pattern(seed, BIG).sum().item() for seed in range(5)]
        assert receiving.result() == expected
        publisher.close()
        assert iterating.result() == expected
        assert (second.number, second.missed, second.statistics().received) == (4, 0, 5)
        with pytest.raises(PeerLostError):
            first.receive()


def test_a_timeout_loses_nothing(place: Place) -> None:
    with Publisher(place.tensors, max_behind=1) as publisher, Subscriber(place.tensors) as subscriber:
        with pytest.raises(TimeoutError):
            publisher.wait_for_subscribers(2, timeout=0.01)
        publisher.wait_for_subscribers(1)
        with pytest.raises(TimeoutError):
            subscriber.receive(timeout=0.01)
        with pytest.raises(WouldBlockError):
            subscriber.receive_nowait()
        publisher.publish_nowait(b"first")
        with pytest.raises(TimeoutError):
            publisher.publish(b"second", timeout=0.01)
        with pytest.raises(TimeoutError):
            publisher.drain(timeout=0.01)
        assert subscriber.receive(timeout=10).message == b"first"
        tensor = publisher.allocate((3,), torch.int64, timeout=10)
        assert publisher.publish(tensor, timeout=10).number == 1
        publication = subscriber.receive(timeout=10)
        assert publication.message.shape == (3,)


# Queues


@pytest.fixture
def queue() -> Iterator[MessageQueue[Any]]:
    with MessageQueue(producers=2, consumers=2, max_messages=2) as queue:
        yield queue
    assert not os.path.exists(queue._settings.folder.path)


def test_threads_put_and_get_messages_with_metadata(queue: MessageQueue[Any]) -> None:
    def produce(start: int) -> None:
        with queue.producer() as producer:
            for number in range(start, start + 10):
                producer.put({"number": number, "frames": pattern(number, BIG)}, timeout=60)

    threads = [in_thread(functools.partial(produce, start)) for start in (0, 10)]
    with queue.consumer() as consumer:
        numbers = []
        for message in consumer:
            assert torch.equal(message["frames"], pattern(message["number"], BIG))
            numbers.append(message["number"])
        with pytest.raises(ClosedError, match=r"all producers of this queue have closed \(producers=2\)"):
            consumer.get()
    assert sorted(numbers) == list(range(20))
    for thread in threads:
        thread.result()


def test_timeouts_raise_would_block_error(queue: MessageQueue[Any]) -> None:
    with queue.consumer() as consumer, queue.producer() as producer:
        for get in (consumer.get_nowait, lambda: consumer.get(timeout=0), lambda: consumer.get(timeout=0.01)):
            with pytest.raises(WouldBlockError):
                get()
        producer.put(None)
        producer.put_nowait(1)
        with pytest.raises(WouldBlockError):
            producer.put_nowait(2)
        with pytest.raises(WouldBlockError):
            producer.put(2, timeout=0.01)
        with pytest.raises(TimeoutError):
            producer.join(timeout=0.01)
        assert [consumer.get(timeout=60), consumer.get(timeout=60)] == [None, 1]
        producer.join()
        assert producer.statistics().taken == 2
        assert consumer.statistics() == ConsumerStatistics(0, 2)


def _put(queue: MessageQueue[Any], start: int) -> None:
    with queue.producer() as producer:
        for number in range(start, start + 5):
            producer.put(pattern(number, BIG))


def _put_and_raise(queue: MessageQueue[Any]) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with queue.producer() as producer:
        producer.put(pattern(0, BIG))
        raise KeyError


@pytest.mark.parametrize("context", [fork, forkserver])
def test_child_processes_put_messages(context: Any, queue: MessageQueue[Any]) -> None:
    children = [context.Process(target=_put, args=(queue, start)) for start in (0, 5)]
    for child in children:
        child.start()
    with queue.consumer() as consumer:
        assert sorted(int(tensor[0]) for tensor in consumer) == list(range(10))
    for child in children:
        child.join()
        assert child.exitcode == 0


@pytest.mark.promise(40)
def test_a_child_process_that_raises_is_reported(queue: MessageQueue[Any]) -> None:
    failing = forkserver.Process(target=_put_and_raise, args=(queue,))
    failing.start()
    failing.join()
    assert failing.exitcode == 1
    with queue.producer():
        pass
    with queue.consumer() as consumer, pytest.raises(PeerLostError, match="1 of the 2 producers"):
        consumer.get(timeout=60)


# Pipes between ranks


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


@pytest.fixture
def pipes() -> Iterator[list[RankPipe]]:
    """Return both ends of an open pipe."""
    store = HashStore()
    pipes = [RankPipe(store, 1 - rank, rank=rank, world_size=2, max_bytes=_MAX * 8) for rank in range(2)]
    opened = [in_thread(pipe.__enter__) for pipe in pipes]
    for opening in opened:
        opening.result()
    yield pipes
    for pipe in pipes:
        pipe.close()


def test_threads_exchange_messages_in_order_and_a_timeout_loses_nothing(pipes: list[RankPipe]) -> None:
    low, high = pipes
    assert [(pipe.rank, pipe.peer) for pipe in pipes] == [(0, 1), (1, 0)]
    with pytest.raises(TimeoutError):
        high.receive(timeout=0.01)
    low.send(pattern(0, _MAX))
    with pytest.raises(TimeoutError):
        low.send(pattern(9, _MAX), timeout=0.01)
    received = in_thread(lambda: [high.receive(copy=True) for _ in range(3)])
    low.send(None)
    low.send(pattern(1, 3))
    low.drain(timeout=10)
    first, second, third = received.result()
    assert _equal(first, pattern(0, _MAX))
    assert second is None
    assert _equal(third, pattern(1, 3))
    high.send(first)
    assert _equal(first, low.receive(copy=True, timeout=10))
