"""A publisher and subscribers in threads."""

import pytest
import torch

from aiotensor import ClosedError, PeerLostError, UnavailableError, WouldBlockError
from aiotensor.blocking import Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.blocking.waiting import in_thread, until
from verification.patterns import BIG, pattern


def test_threads_publish_and_receive(endpoint: Endpoint) -> None:
    with (
        Publisher(endpoint, max_behind=2) as publisher,
        Subscriber(endpoint, torch.Tensor) as first,
        Subscriber(endpoint, torch.Tensor) as second,
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
    assert publisher.statistics().published == 5
    with pytest.raises(ClosedError):
        first.receive()


def test_a_subscriber_without_a_publisher_raises_unavailable_error(endpoint: Endpoint) -> None:
    with Subscriber(endpoint, max_wait_s=0.5) as subscriber:
        for receive in (subscriber.receive_nowait, subscriber.receive):
            with pytest.raises(UnavailableError, match="no publisher "):
                receive()


def test_a_timeout_loses_nothing(endpoint: Endpoint) -> None:
    with Publisher(endpoint, max_behind=1) as publisher, Subscriber(endpoint) as subscriber:
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
        tensor = publisher.allocate((BIG,), torch.int64, timeout=10)
        tensor[:] = pattern(1, BIG)
        assert publisher.publish(tensor, timeout=10).number == 1
        assert torch.equal(subscriber.receive(timeout=10).message, pattern(1, BIG))
        del tensor
        until(lambda: not publisher.statistics().bytes_in_use)
    assert (publisher.id, subscriber.id) == (publisher.inner.id, subscriber.inner.id)


def test_closing_ends_the_iteration_of_another_thread(endpoint: Endpoint) -> None:
    with Publisher(endpoint) as publisher, Subscriber(endpoint) as subscriber:
        publisher.wait_for_subscribers(1)
        iterating = in_thread(lambda: list(subscriber))
        until(lambda: subscriber.statistics().waiting == 1)
        subscriber.close()
        assert iterating.result() == []
