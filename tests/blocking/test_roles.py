"""Publishers, subscribers, queues and pipes between ranks, in threads."""

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiotensor import ClosedError, PeerLostError, WouldBlockError
from aiotensor.blocking import MessageQueue, Publisher, Subscriber
from aiotensor.queues import ConsumerStatistics
from tests.blocking.waiting import Place, in_thread
from verification.patterns import BIG, pattern
from verification.processes import peers

forkserver: Any = peers.contexts["forkserver"]

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


def _put_and_raise(queue: MessageQueue[Any]) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with queue.producer() as producer:
        producer.put(pattern(0, BIG))
        raise KeyError


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
