"""Each publication arrives at every subscriber: once, in order, and unchanged."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import Parameter

from aiotensor import (
    ClosedError,
    PeerLostError,
    ProtocolError,
    TooLargeError,
    UnavailableError,
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast.audiences import Batch, Broadcasts, idle, received, turns
from verification.fuzz.listening import waiting_at
from verification.internals import worker_of
from verification.patterns import BIG, pattern
from verification.processes import watch
from verification.waiting import until

once = pytest.mark.parametrize("endpoint", ["unix"], indirect=True)  # the link makes no difference


@pytest.mark.promise(33)
@pytest.mark.parametrize("count", [0, 3])
async def test_every_subscriber_receives_every_publication_in_order(
    broadcasts: Broadcasts, count: int
) -> None:
    async with broadcasts.open(count, Batch) as (publisher, subscribers):
        for number in range(20):
            size = (3, BIG)[number % 2]
            sent = await publisher.publish(Batch(f"batch {number}", pattern(number, size)))
            assert sent == (number, count, 0)
            for subscriber in subscribers:
                publication = await subscriber.receive()
                assert (publication.number, publication.missed) == (number, 0)
                assert publication.message.name == f"batch {number}"
                assert torch.equal(publication.message.pixels, pattern(number, size))
                assert (subscriber.number, subscriber.missed) == (number, 0)
                del publication
        await idle(publisher)


_CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor.flip(0),
    lambda tensor: tensor[::2, 1::3].to(torch.bfloat16).t(),
    lambda tensor: tensor[:1].expand(500, -1),
    lambda tensor: tensor.to(torch.complex64).conj(),
    lambda tensor: tensor.to(torch.complex64).conj().imag,
    lambda tensor: tensor.clone().requires_grad_(),
    lambda tensor: Parameter(tensor, requires_grad=False),
    lambda tensor: tensor.view(5, 100, 500).permute(2, 0, 1),
    lambda tensor: tensor[0, 0],
    lambda tensor: tensor[:0],
]


async def test_views_and_attributes_of_tensors_arrive(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, torch.Tensor) as (publisher, subscribers):
        for number, change in enumerate(_CHANGES):
            tensor = change(torch.arange(250_000.0).reshape(500, 500))
            await publisher.publish(tensor)
            for subscriber in subscribers:
                message = (await subscriber.receive()).message
                assert (message.dtype, message.shape) == (tensor.dtype, tensor.shape), number
                assert torch.equal(message, tensor), number
                if tensor.dim() == 3:  # it is permuted
                    assert message.stride() == tensor.stride(), number
                assert type(message) is type(tensor), number
                assert message.requires_grad == tensor.requires_grad, number
                assert message.is_leaf, number


@once
async def test_tied_tensors_are_published_once_and_arrive_tied(broadcasts: Broadcasts) -> None:
    tensor = pattern(1, BIG)
    async with broadcasts.open(1, dict[str, torch.Tensor]) as (publisher, [subscriber]):
        await publisher.publish({"embedding": tensor, "head": tensor.detach()})
        message = (await subscriber.receive()).message
        assert torch.equal(message["embedding"], tensor)
        message["embedding"].zero_()
        assert not message["head"].any()
        assert publisher.statistics().tensors_copied == 1
        del message
        await idle(publisher)


async def test_many_tensors_arrive_and_small_ones_share_a_block(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, list[torch.Tensor]) as (publisher, subscribers):
        for size in (100, 2000):
            message = [pattern(number, size) for number in range(700)]
            await publisher.publish(message)
            if size == 100:
                assert publisher.statistics().tensors_copied == 1
            for subscriber in subscribers:
                found = (await subscriber.receive()).message
                assert all(map(torch.equal, found, message))
                del found
        await idle(publisher)


async def test_an_allocated_tensor_is_not_copied(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, list[torch.Tensor]) as (publisher, subscribers):
        tensor = await publisher.allocate((4, BIG), torch.int64)
        for row in range(4):
            tensor[row] = pattern(row, BIG)
        await publisher.publish([tensor[0], tensor[2:]])
        assert publisher.statistics().tensors_copied == 0
        for subscriber in subscribers:
            message = (await subscriber.receive()).message
            assert torch.equal(message[0], tensor[0])
            assert torch.equal(message[1], tensor[2:])
            del message
        await until(lambda: publisher.statistics().lags[0].held_bytes == 0)
        assert publisher.statistics().bytes_in_use  # the caller still has it
        del tensor
        await idle(publisher)


@once
async def test_an_allocated_tensor_in_use_is_copied_when_it_is_published_again(
    broadcasts: Broadcasts,
) -> None:
    """Otherwise a subscriber that has written to the first would find its changes in the second."""
    async with broadcasts.open(1, torch.Tensor) as (publisher, [subscriber]):
        tensor = await publisher.allocate((BIG,), torch.int64)
        tensor[:] = pattern(1, BIG)
        await publisher.publish(tensor)
        first = (await subscriber.receive()).message
        first.zero_()
        await publisher.publish(tensor)
        second = (await subscriber.receive()).message
        assert torch.equal(second, pattern(1, BIG))
        assert publisher.statistics().tensors_copied == 1


@once
async def test_publishing_raises_instead_of_waiting_for_unpublished_allocations(
    broadcasts: Broadcasts,
) -> None:
    async with broadcasts.open(1, torch.Tensor, arena_bytes=3 * (BIG * 8 + 4096)) as (
        publisher,
        [subscriber],
    ):
        allocated = [await publisher.allocate((BIG,), torch.int64) for _ in range(2)]
        await publisher.publish(pattern(0, BIG))  # the subscriber uses the rest of the memory
        waiting = [asyncio.create_task(publisher.publish(pattern(2, 2 * BIG)))]
        await until(lambda: publisher.statistics().waiting == 1)
        waiting += [asyncio.create_task(publisher.publish(t.copy_(pattern(1, BIG)))) for t in allocated]
        await until(lambda: publisher.statistics().waiting == 3)
        allocated.clear()  # calls that wait for their turn hold them
        with pytest.raises(WouldBlockError, match=r"by tensors from allocate\(\) that no") as caught:
            assert torch.equal((await subscriber.receive()).message, pattern(0, BIG))
            await waiting.pop(0)
        assert caught.value.bytes.requested >= 2 * BIG * 8  # in whole pages
        for number, task in enumerate(waiting, 1):
            assert (await task).number == number
            assert torch.equal((await subscriber.receive()).message, pattern(1, BIG))


@once
async def test_a_repeated_publication_never_waits_for_its_own_tensor(broadcasts: Broadcasts) -> None:
    """Its copy needs memory while a subscriber uses the tensor, and none later."""
    async with broadcasts.open(1, torch.Tensor, arena_bytes=BIG * 8 + 4096) as (publisher, [subscriber]):
        tensor = await publisher.allocate((BIG,), torch.int64)
        tensor[:] = pattern(1, BIG)
        await publisher.publish(tensor)
        again = asyncio.create_task(publisher.publish(tensor))
        await until(lambda: publisher.statistics().waiting == 1)
        await subscriber.receive()  # and free it
        with pytest.raises(WouldBlockError, match="an earlier publication of it is in use"):
            await again
        assert (await publisher.publish(tensor)).number == 1
        assert torch.equal((await subscriber.receive()).message, pattern(1, BIG))


@once
async def test_receiving_without_a_publisher_raises_unavailable_error(endpoint: Endpoint) -> None:
    async with Subscriber(endpoint, torch.Tensor, max_wait_s=0.5) as subscriber:
        with pytest.raises(UnavailableError, match=r"^no publication has arrived: no publisher "):
            subscriber.receive_nowait()
        with pytest.raises(UnavailableError, match=r"arrived within 0\.5 s: no publisher "):
            await subscriber.receive()
        assert subscriber.statistics().errors == {"UnavailableError": 2}


async def test_a_publisher_that_has_not_answered_is_unavailable(address: str) -> None:
    with waiting_at(address):
        async with Subscriber(address) as subscriber:
            with pytest.raises(UnavailableError, match="arrived: no publisher has answered"):
                subscriber.receive_nowait()


@pytest.mark.promise(31)
async def test_a_message_of_another_type_is_reported_and_skipped(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, Batch) as (publisher, [first, second]):
        await publisher.publish([pattern(1, BIG)])
        await publisher.publish(Batch("a", pattern(2, 3)))
        with pytest.raises(ProtocolError, match="cannot be decoded"):
            await first.receive()
        assert (await first.receive()).number == 1
        await until(lambda: second.statistics().unclaimed == 2)
        with pytest.raises(ProtocolError, match="cannot be decoded"):
            second.receive_nowait()
        assert second.receive_nowait().number == 1
        await idle(publisher)


class Positive(msgspec.Struct):
    """A message whose type raises its own errors for some values."""

    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise KeyError(self.number)
        if self.number == 0:
            raise FileNotFoundError


@once
async def test_a_publication_that_its_type_refuses_is_received_once(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(1, Positive, max_behind=1) as (publisher, [subscriber]):
        for number, error in ((-1, KeyError), (0, FileNotFoundError), (-1, KeyError)):
            await publisher.publish({"number": number})
            with pytest.raises(error):
                await subscriber.receive()
        await publisher.publish({"number": 1})
        assert (await subscriber.receive()).message == Positive(1)


_REFUSED: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "object": (object, TypeError),
    "sparse": (lambda: [pattern(1, BIG), torch.zeros(3).to_sparse()], UnsupportedTensorError),
    "integer": (lambda: 1 << 70, OverflowError),
    "large": (lambda: torch.zeros(2 << 20), TooLargeError),
    "large together": (lambda: [torch.zeros(1 << 18), torch.zeros(1 << 18)], TooLargeError),
    "long": (lambda: b"0" * (2 << 20), TooLargeError),
}


@pytest.mark.promise(11)
@once
async def test_a_message_that_cannot_be_published_has_no_effect(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, arena_bytes=1 << 20) as (publisher, subscribers):
        for number, (make, error) in enumerate(_REFUSED.values()):
            with pytest.raises(error):
                await publisher.publish(make())
            with pytest.raises(error):
                publisher.publish_nowait(make())
            assert publisher.statistics().bytes_in_use == 0
            assert await publisher.publish(b"next") == (number, 2, 0)
            for subscriber in subscribers:
                assert await received(subscriber, 1) == [b"next"]


async def test_a_connection_that_ends_before_the_publisher_admits_it_is_not_a_lost_publisher(
    address: str,
) -> None:
    """A process that is being killed may still accept connections."""
    async with Subscriber(address, torch.Tensor) as subscriber:
        receiving = asyncio.create_task(subscriber.receive())
        with waiting_at(address) as listener:
            for _ in range(3):
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                connection.close()
        async with Publisher(address) as publisher:
            await publisher.wait_for_subscribers(1)
            await publisher.publish(pattern(1, 3))
            assert torch.equal((await receiving).message, pattern(1, 3))
        assert subscriber.statistics().publishers_lost == 0


@once
async def test_wait_for_subscribers_returns_or_raises_after_max_wait_s(endpoint: Endpoint) -> None:
    async with Publisher(endpoint, max_wait_s=0.05, max_subscribers=3) as publisher:
        with pytest.raises(WouldBlockError, match="0 of 2 subscribers") as caught:
            await publisher.wait_for_subscribers(2)
        assert (caught.value.messages.limit, caught.value.messages.requested) == (2, 2)
        for wrong in (0, -1, 4):
            with pytest.raises(ValueError, match="count must be"):
                await publisher.wait_for_subscribers(wrong)
    async with Publisher(endpoint) as publisher, Subscriber(endpoint), Subscriber(endpoint):
        await publisher.wait_for_subscribers(2)
        await publisher.wait_for_subscribers(1)


async def test_a_clean_close_ends_the_iteration_after_the_last_publication(broadcasts: Broadcasts) -> None:
    messages = [pattern(number, (3, BIG)[number % 2]) for number in range(5)]
    async with broadcasts.open(2) as (publisher, [iterating, receiving]):
        for message in messages:
            await publisher.publish(message)
        await publisher.aclose()
        for subscriber in (iterating, receiving):
            await until(lambda subscriber=subscriber: not subscriber.statistics().publishers)  # type: ignore[misc]
        found = [publication async for publication in iterating]
        assert [one.number for one in found] == list(range(5))
        assert all(torch.equal(one.message, messages[one.number]) for one in found)
        assert all(map(torch.equal, await received(receiving, 5), messages))
        with pytest.raises(PeerLostError):
            await receiving.receive()


@once
async def test_closing_a_subscriber_ends_its_calls(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(1) as (publisher, [subscriber]):
        receiving = asyncio.create_task(subscriber.receive())
        iterating = [asyncio.create_task(_all_of(subscriber)) for _ in range(2)]
        await until(lambda: subscriber.statistics().waiting == 3)
        await subscriber.aclose()
        with pytest.raises(ClosedError):
            await receiving
        assert [await one for one in iterating] == [[], []]
        assert await _all_of(subscriber) == []
        with pytest.raises(ClosedError):
            await subscriber.receive()
        await until(lambda: not publisher.statistics().subscribers)


@once
async def test_a_closing_subscriber_keeps_no_memory_of_a_publisher_that_closes(
    broadcasts: Broadcasts, no_collections: None
) -> None:
    go_on = threading.Event()
    async with broadcasts.open(1) as (publisher, [subscriber]):
        working = worker_of(subscriber).submit(go_on.wait)
        closing = asyncio.create_task(subscriber.aclose())  # waits for the worker
        try:
            await turns()
            await publisher.publish(pattern(0, BIG))
            await publisher.aclose()
            await until(lambda: not subscriber.statistics().publishers)
        finally:
            go_on.set()
        await closing
        await working
        assert not watch.memfds(os.getpid())


async def _all_of(subscriber: Subscriber[Any]) -> list[Any]:
    return [publication.message async for publication in subscriber]


async def test_messages_are_freed_with_their_last_reference(
    broadcasts: Broadcasts, no_collections: None
) -> None:
    async with broadcasts.open(1, Batch) as (publisher, [subscriber]):
        source = Batch("a", pattern(1, BIG))
        before = sys.getrefcount(source.pixels)
        await publisher.publish(source)
        publication = await subscriber.receive()
        await until(lambda: sys.getrefcount(source.pixels) == before)  # the copying thread drops it last
        assert publisher.statistics().lags[0].held_bytes
        del publication
        await idle(publisher)


@pytest.mark.promise(22)
async def test_all_objects_are_opened_in_one_task_and_closed_in_another(endpoint: Endpoint) -> None:
    publisher = Publisher(endpoint)
    subscribers = [Subscriber(endpoint, torch.Tensor) for _ in range(2)]
    await asyncio.create_task(publisher.__aenter__())
    for subscriber in subscribers:
        await asyncio.create_task(subscriber.__aenter__())
    await asyncio.create_task(publisher.wait_for_subscribers(2))
    await asyncio.create_task(publisher.publish(pattern(0, BIG)))
    for subscriber in subscribers:
        publication = await asyncio.create_task(subscriber.receive())
        assert torch.equal(publication.message, pattern(0, BIG))
        del publication
    await asyncio.create_task(publisher.aclose())
    for subscriber in subscribers:
        await asyncio.create_task(subscriber.aclose())


def _uses(publisher: Publisher, subscriber: Subscriber[torch.Tensor]) -> list[Callable[[], object]]:
    """Use both objects in all ways; coroutines run up to their first wait."""
    return [
        lambda: publisher.publish_nowait(b""),
        lambda: publisher.publish(b"").send(None),
        lambda: publisher.allocate((1,), torch.uint8).send(None),
        lambda: publisher.wait_for_subscribers(1).send(None),
        lambda: publisher.drain().send(None),
        lambda: publisher.aclose().send(None),
        publisher.statistics,
        subscriber.receive_nowait,
        lambda: subscriber.receive().send(None),
        lambda: subscriber.__anext__().send(None),
        lambda: subscriber.aclose().send(None),
        subscriber.statistics,
    ]


@pytest.mark.promise(23)
async def test_every_use_in_another_thread_or_loop_raises_at_once(endpoint: Endpoint) -> None:
    async def use_there(use: Callable[[], object]) -> None:
        use()

    async with (
        Publisher(endpoint) as publisher,
        Subscriber(endpoint, torch.Tensor) as subscriber,
    ):
        await publisher.wait_for_subscribers(1)
        for use in _uses(publisher, subscriber):
            with pytest.raises(UsageError, match="another thread"):
                await asyncio.to_thread(use)
            with pytest.raises(UsageError, match="another thread"):
                await asyncio.to_thread(lambda: asyncio.run(use_there(use)))  # noqa: B023
        await publisher.publish(pattern(1, BIG))
        assert torch.equal((await subscriber.receive()).message, pattern(1, BIG))
