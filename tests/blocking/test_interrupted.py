"""Calls that a signal handler interrupts lose no item, even if the item has been taken for them."""

import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor.blocking import (
    MessageClient,
    MessageQueue,
    MessageServer,
    Publisher,
    RankPipe,
    Request,
    Subscriber,
    TensorReceiver,
    TensorSender,
)
from aiotensor.blocking.portal import BlockingObject
from tests.blocking.waiting import Place, in_thread, until
from verification import inside

pytestmark = pytest.mark.filterwarnings(  # raised in a finalizer of the interpreter or of a library
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

_COUNT = 300
_LONGEST_S = 0.0005  # about as long as a call takes, so that signals arrive at each of its steps


class Role(NamedTuple):
    """Both sides of a role, each of whose items contains a number."""

    send: Callable[[int], object]
    receive: Callable[[], Any]
    number: Callable[[Any], int]
    owner: BlockingObject[Any, Any]  # which receives


@contextmanager
def _iterated_subscriber(place: Place) -> Iterator[Role]:
    def receive() -> object:
        for publication in subscriber:
            return publication
        raise AssertionError("the iteration has ended")

    with Publisher(place.tensors) as publisher, Subscriber(place.tensors, int) as subscriber:
        publisher.wait_for_subscribers(1)
        yield Role(publisher.publish, receive, lambda found: found.message, subscriber)


@contextmanager
def _consumer(place: Place) -> Iterator[Role]:
    with MessageQueue(int) as queue, queue.consumer() as consumer, queue.producer() as producer:
        yield Role(producer.put, consumer.get, int, consumer)
        producer.join()


@contextmanager
def _pipe(place: Place) -> Iterator[Role]:
    store = HashStore()
    pipes = [RankPipe(store, 1 - rank, rank=rank, world_size=2) for rank in range(2)]
    opening = in_thread(pipes[1].__enter__)
    with pipes[0] as pipe, closing(opening.result()) as other:
        yield Role(lambda number: pipe.send(torch.tensor([number])), other.receive, int, other)


@contextmanager
def _receiver(place: Place) -> Iterator[Role]:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors) as sender:
        yield Role(
            lambda number: sender.send(torch.tensor([number])),
            receiver.next,
            lambda found: int(found.tensor),
            receiver,
        )


@contextmanager
def _server(place: Place) -> Iterator[Role]:
    def number_in(request: Request[int]) -> int:
        number = request.message
        request.answer(None)
        return number

    with (
        MessageServer(place.messages, int) as server,
        MessageClient(place.messages, int) as client,
    ):
        yield Role(client.send, server.next, number_in, server)


_ROLES = {
    "Subscriber": _iterated_subscriber,
    "QueueConsumer.get": _consumer,
    "RankPipe.receive": _pipe,
    "TensorReceiver.next": _receiver,
    "MessageServer.next": _server,
}


class InterruptedTestError(Exception):
    """Raised by the signal handler."""


@pytest.fixture
def repeat(moments: random.Random) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Return a function that makes a call, interrupts it, and repeats it until it returns."""

    def interrupt(*_: object) -> None:
        raise InterruptedTestError

    def repeat(call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        while not found:
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, _LONGEST_S))
                found.append(call())
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptedTestError:
                pass
        return found[0]

    before = signal.signal(signal.SIGALRM, interrupt)
    yield repeat
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.promise(21)
@pytest.mark.parametrize("role", _ROLES)
def test_interrupted_calls_lose_nothing(
    role: str, place: Place, repeat: Callable[[Callable[[], Any]], Any]
) -> None:
    with _ROLES[role](place) as (send, receive, number_in, _):
        sending = in_thread(lambda: [send(number) for number in range(_COUNT)])
        found = [repeat(receive) for _ in range(_COUNT)]
        assert sorted(map(number_in, found)) == list(range(_COUNT))
        sending.result()


def _interrupt_after_taking(role: Role, then: Callable[[], object]) -> None:
    """Interrupt a call after an item was taken for it, and call a function before the call ends."""

    def handle(*_: object) -> None:
        in_thread(lambda: role.send(7))
        until(lambda: not inside.takers(role.owner))
        then()
        raise InterruptedTestError

    def signal_when_waiting() -> None:
        main = threading.main_thread().ident or 0
        until(lambda: inside.takers(role.owner))
        # Before, the main thread holds the lock that the calls of other threads need for a moment.
        until(lambda: sys._current_frames()[main].f_code.co_name == "_wait")
        signal.pthread_kill(main, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        in_thread(signal_when_waiting)
        with pytest.raises(InterruptedTestError):
            role.receive()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.promise(21)
@pytest.mark.parametrize("name", _ROLES)
def test_a_waiting_thread_gets_the_item_of_an_interrupted_one(name: str, place: Place) -> None:
    waiting: list[Future[Any]] = []
    with _ROLES[name](place) as role:

        def wait() -> None:
            waiting.append(in_thread(role.receive))
            until(lambda: inside.takers(role.owner))

        _interrupt_after_taking(role, wait)
        assert role.number(waiting[0].result(20)) == 7


def test_closing_logs_the_items_of_interrupted_threads(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with _consumer(place) as role:
        _interrupt_after_taking(role, lambda: None)
        assert not caplog.records
    [record] = caplog.records
    assert record.getMessage().startswith("this QueueConsumer was closed with items that calls had taken")
    assert record.getMessage().endswith("(lost=1)")


def test_an_interrupted_receive_by_handle_can_be_repeated(
    place: Place, repeat: Callable[[Callable[[], Any]], Any]
) -> None:
    with TensorReceiver(place.tensors) as receiver, TensorSender(place.tensors) as sender:
        for number in range(_COUNT):
            handle = sender.send(torch.tensor([number]))
            # A `partial` could be interrupted with the tensor that it is about to return.
            assert int(repeat(lambda: receiver.receive(handle))) == number  # noqa: B023


def test_an_iteration_stays_at_its_end(place: Place) -> None:
    with Subscriber(place.tensors) as subscriber:
        publications = iter(subscriber)
        for count in range(2):
            with Publisher(place.tensors) as publisher:
                publisher.wait_for_subscribers(1)
                for _ in range(count):
                    publisher.publish(b"for the next iteration")
            assert list(publications) == []
        assert len(list(subscriber)) == 1


def test_an_iteration_keeps_no_item(place: Place) -> None:
    """Neither does it keep the memory of an item while it waits for the next one."""
    nbytes = 1 << 19
    with (
        Publisher(place.tensors, arena_bytes=nbytes) as publisher,
        Subscriber(place.tensors, torch.Tensor) as subscriber,
        MessageQueue(torch.Tensor, arena_bytes=nbytes) as queue,
        queue.consumer() as consumer,
        queue.producer() as producer,
    ):
        publisher.wait_for_subscribers(1)
        for items, send in ((subscriber, publisher.publish), (consumer, producer.put)):
            sending = in_thread(lambda: [send(torch.ones(nbytes, dtype=torch.uint8)) for _ in range(3)])  # noqa: B023
            for item in itertools.islice(items, 3):
                del item
            sending.result()
