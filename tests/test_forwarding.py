"""Received tensors that are sent on: no copy on one machine, and the effects of a copy for everyone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest
import torch

from aiotensor import (
    RefusedError,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    TooLargeError,
)
from aiotensor.broadcast import Publisher, Subscriber
from tests import selection
from tests.ranks.pipes import ends
from verification.patterns import BIG, pattern
from verification.places import LINKS
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1 << 20


class Hop(NamedTuple):
    """A sender and its receiver."""

    sender: TensorSender
    receiver: TensorReceiver

    async def pass_on(self, tensor: torch.Tensor) -> torch.Tensor:
        return await self.receiver.receive(await self.sender.send(tensor))


@asynccontextmanager
async def hops(count: int, link: str = "queue", **limits: Any) -> AsyncIterator[list[Hop]]:
    """Open pairs of senders and receivers."""
    async with AsyncExitStack() as stack:
        pairs = []
        for _ in range(count):
            place = stack.enter_context(LINKS[link].place()).endpoint
            receiver = await stack.enter_async_context(TensorReceiver(place))
            pairs.append(Hop(await stack.enter_async_context(TensorSender(place, **limits)), receiver))
        for pair in pairs:
            await pair.sender.ready()
        yield pairs


async def idle(*all_hops: Hop) -> None:
    """Wait until every sender has its memory back, and the tensors that it has forwarded were released."""
    for hop in all_hops:
        await until(lambda sender=hop.sender: not sender.statistics().holders)  # type: ignore[misc]


async def _post(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    handle = sender.post(tensor)
    await sender.copied(handle)
    return handle


async def _send_nowait(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    return sender.send_nowait(tensor)


async def _send_in_message(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    async with sender.message() as message:
        return await message.send(tensor)


WAYS: dict[str, Callable[[TensorSender, torch.Tensor], Awaitable[TensorHandle]]] = {
    "send": TensorSender.send,
    "post": _post,
    "send_nowait": _send_nowait,
    "message": _send_in_message,
}


@pytest.mark.promise(7, 39)
@pytest.mark.parametrize("link", selection.LINKS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_received_tensor_is_sent_on_without_a_copy_on_one_machine(way: str, link: str) -> None:
    async with hops(2, link) as (first, second):
        received = await first.pass_on(pattern(1, BIG))
        sent_on = await second.receiver.receive(await WAYS[way](second.sender, received))
        assert torch.equal(sent_on, pattern(1, BIG))
        statistics = second.sender.statistics()
        if LINKS[link].is_local:
            assert (statistics.bytes_forwarded, statistics.bytes_copied) == (received.nbytes, 0)
            assert statistics.bytes_in_use == 0  # of the second sender
            del received
            await first.pass_on(pattern(2, 1))
            await first.sender.drain()  # a release would have arrived before that
            assert first.sender.statistics().bytes_in_use == sent_on.nbytes
        else:
            assert (statistics.bytes_forwarded, statistics.bytes_copied) == (0, received.nbytes)
            del received
        del sent_on
        await idle(first, second)


@pytest.mark.parametrize(
    ("view", "is_forwarded"),
    [
        (lambda tensor: tensor[3:-5], True),
        (lambda tensor: tensor.view(-1, 8).t(), True),
        (lambda tensor: tensor.view(torch.int32)[1:], True),
        (lambda tensor: tensor.numpy(), True),
        (lambda tensor: tensor.view(-1, 8)[:, 1:], False),  # it has gaps
        (lambda tensor: tensor.view(torch.complex128).conj(), False),
    ],
)
async def test_a_view_without_gaps_is_forwarded(view: Callable[[Any], Any], is_forwarded: bool) -> None:
    async with hops(2) as (first, second):
        received = await first.pass_on(pattern(1, BIG).double())
        sent_on = await second.pass_on(view(received))
        assert torch.equal(sent_on, torch.as_tensor(view(pattern(1, BIG).double())))
        assert (second.sender.statistics().bytes_forwarded > 0) is is_forwarded


@pytest.mark.promise(8, 35, 39)
async def test_writes_after_forwarding_are_visible_only_to_their_writer() -> None:
    async with hops(3) as (first, second, third):
        source = await first.sender.allocate((BIG,), torch.int64)
        source.copy_(pattern(1, BIG))
        received = await first.pass_on(source)
        sent_on = await second.pass_on(received)
        last = await third.pass_on(sent_on)
        assert third.sender.statistics().bytes_copied == 0
        for writer, tensor in enumerate((received, sent_on, last), 2):
            tensor += writer
        for number, tensor in enumerate((source, received, sent_on, last)):
            assert torch.equal(tensor, pattern(1, BIG) + (number + 1 if number else 0))


@pytest.mark.promise(8, 39)
async def test_each_part_of_a_block_is_isolated_when_it_is_sent_on() -> None:
    async with hops(1) as [first], hops(1) as [second]:
        source = await first.sender.allocate((2 * BIG,), torch.int64)
        source.copy_(pattern(1, 2 * BIG))
        for part in (slice(0, BIG), slice(BIG, None)):  # they share a page
            received = await first.pass_on(source[part])
            sent_on = await second.pass_on(received)
            received.zero_()
            assert torch.equal(sent_on, pattern(1, 2 * BIG)[part])
        assert torch.equal(source, pattern(1, 2 * BIG))


@pytest.mark.promise(7, 39)
async def test_a_tensor_that_was_written_to_after_forwarding_arrives_with_the_new_values() -> None:
    async with hops(2) as (first, second):
        received = await first.pass_on(pattern(1, BIG))
        earlier = await second.pass_on(received)
        received[BIG // 2] = 0
        expected = received.clone()
        for _ in range(2):  # while the earlier one is in use, and afterwards
            later = await second.pass_on(received)
            assert torch.equal(later, expected)
            assert second.sender.statistics().bytes_forwarded == received.nbytes
            del later
            earlier = pattern(0, 0)
            await idle(second)
        assert earlier.numel() == 0


@pytest.mark.promise(7, 39)
async def test_a_reader_that_wrote_to_a_tensor_sees_the_values_of_the_next_one() -> None:
    async with hops(2) as (first, second):
        received = await first.pass_on(pattern(1, BIG))
        sent_on = await second.pass_on(received)
        sent_on.zero_()
        again = await second.pass_on(received)  # in use: this one is a copy
        assert torch.equal(again, pattern(1, BIG))
        del received, sent_on, again
        await idle(first, second)
        for seed in (2, 3):  # in the same block
            received = await first.pass_on(pattern(seed, BIG))
            sent_on = await second.pass_on(received)
            assert torch.equal(sent_on, pattern(seed, BIG))
            received.zero_()
            sent_on.zero_()
            del received, sent_on
            await idle(first, second)
        assert second.sender.statistics().bytes_copied == BIG * 8


@pytest.mark.promise(39)
async def test_a_tensor_larger_than_the_arena_can_only_be_forwarded() -> None:
    async with hops(1) as [first], hops(1, arena_bytes=MIB) as [second]:
        received = await first.pass_on(pattern(1, MIB))
        assert torch.equal(await second.pass_on(received), pattern(1, MIB))
        place = TensorQueue()
        async with (
            hops(1, "tcp", arena_bytes=MIB) as [remote],
            Publisher(place, arena_bytes=MIB) as publisher,
            Subscriber(place) as subscriber,
        ):
            await publisher.wait_for_subscribers(1)
            await publisher.publish(received)
            received += 1
            for hop in (second, remote):
                for send in (hop.sender.send, _send_nowait_of(hop.sender)):
                    with pytest.raises(TooLargeError):
                        await send(received)
                await idle(hop)
            for publish in (publisher.publish, _publish_nowait_of(publisher)):
                with pytest.raises(TooLargeError):
                    await publish(received)
            assert torch.equal((await subscriber.receive()).message, pattern(1, MIB))


def _send_nowait_of(sender: TensorSender) -> Callable[[torch.Tensor], Awaitable[TensorHandle]]:
    async def send(tensor: torch.Tensor) -> TensorHandle:
        return sender.send_nowait(tensor)

    return send


def _publish_nowait_of(publisher: Publisher) -> Callable[[torch.Tensor], Awaitable[object]]:
    async def publish(tensor: torch.Tensor) -> object:
        return publisher.publish_nowait(tensor)

    return publish


@pytest.mark.promise(39)
@pytest.mark.parametrize("waits", [True, False])
async def test_a_received_tensor_is_published_to_all_subscribers_without_a_copy(waits: bool) -> None:
    queue = TensorQueue()
    async with hops(1) as [first], Publisher(queue, history=1) as publisher:
        received = await first.pass_on(pattern(1, BIG))
        async with Subscriber(queue) as early:
            await publisher.wait_for_subscribers(1)
            message = {"whole": received, "other": pattern(2, BIG)}
            if waits:
                await publisher.publish(message)
            else:
                publisher.publish_nowait(message)
            del received, message
            async with Subscriber(queue) as late:
                for subscriber in (early, late):
                    tensors = (await subscriber.receive()).message
                    assert torch.equal(tensors["whole"], pattern(1, BIG))
                    tensors["whole"].zero_()
                    del tensors
        assert publisher.statistics().bytes_forwarded == publisher.statistics().bytes_copied == BIG * 8
        assert first.sender.statistics().bytes_in_use == BIG * 8  # in the history
        await publisher.publish(None)
        await idle(first)


@pytest.mark.promise(34, 39)
async def test_forwarded_bytes_count_towards_the_limit_of_a_slow_subscriber() -> None:
    queue = TensorQueue()
    limits: dict[str, Any] = {"slow": "drop", "max_behind": 4, "max_held_bytes": 3 * BIG * 4}
    async with hops(1) as [first], Publisher(queue, **limits) as publisher, Subscriber(queue) as subscriber:
        await publisher.wait_for_subscribers(1)
        received = [await first.pass_on(pattern(seed, BIG)) for seed in range(2)]
        for tensor in received:
            await publisher.publish(tensor)
        del received, tensor
        taken = await subscriber.receive()  # the second one would exceed `max_held_bytes`
        await until(lambda: publisher.statistics().lags[0].behind == 1)
        assert publisher.statistics().lags[0].held_bytes == BIG * 8
        del taken
        assert torch.equal((await subscriber.receive()).message, pattern(1, BIG))
        await idle(first)


@pytest.mark.promise(39)
async def test_a_pipe_forwards_what_it_or_another_object_has_received() -> None:
    async with hops(1) as [first], ends(max_bytes=32 * BIG) as (left, right):
        received = await first.pass_on(pattern(1, BIG))
        await left.send(received)
        assert left.statistics().bytes_in_use == BIG * 8
        there = await right.receive()
        assert there is not None
        await right.send(there)
        back = await left.receive()
        assert back is not None
        assert torch.equal(back, pattern(1, BIG))
        for pipe in (left, right):
            assert pipe.statistics().bytes_forwarded == BIG * 8
            assert pipe.statistics().bytes_copied == 0
        del there, back
        await until(lambda: not left.statistics().leases)
        assert first.sender.statistics().bytes_in_use == BIG * 8
        del received
        await idle(first)


@pytest.mark.promise(39)
async def test_a_block_returns_to_its_owner_after_the_sender_that_forwarded_it_has_closed() -> None:
    async with hops(1) as [first]:
        async with hops(1) as [second]:
            received = await first.pass_on(pattern(1, BIG))
            last = await second.pass_on(received)
            unread = await second.sender.send(await first.pass_on(pattern(2, BIG)))
            del received
        assert unread.shape == (BIG,)
        await first.pass_on(pattern(2, 1))
        await first.sender.drain()  # a release would have arrived before that
        assert first.sender.statistics().bytes_in_use >= last.nbytes
        await first.pass_on(pattern(3, 3 * BIG))  # reuses no memory of the tensor
        assert torch.equal(last, pattern(1, BIG))
        del last
        await idle(first)


@pytest.mark.promise(39)
async def test_memory_of_more_senders_than_can_be_shared_at_once_is_copied() -> None:
    async with hops(9) as origins, hops(1) as [last]:
        received = [await origin.pass_on(pattern(seed, BIG)) for seed, origin in enumerate(origins)]
        sent_on = [await last.pass_on(tensor) for tensor in received]
        assert last.sender.statistics().bytes_copied == BIG * 8
        for seed, tensor in enumerate(sent_on):
            assert torch.equal(tensor, pattern(seed, BIG))
        del sent_on, tensor
        await idle(last)
        for seed, one in enumerate(received):  # segments without used blocks are detached
            assert torch.equal(await last.pass_on(one), pattern(seed, BIG))
            await idle(last)
        assert last.sender.statistics().bytes_copied == BIG * 8


@pytest.mark.promise(39)
async def test_a_chain_that_is_too_long_to_forward_copies() -> None:
    async with hops(9) as chain:
        tensor = pattern(1, BIG)
        for hop in chain:
            tensor = await hop.pass_on(tensor)
        assert torch.equal(tensor, pattern(1, BIG))
        assert sum(hop.sender.statistics().bytes_copied for hop in chain) == 2 * tensor.nbytes
        del tensor
        await idle(*chain)


@pytest.mark.promise(14, 26, 39)
async def test_a_receiver_with_too_low_a_limit_refuses_forwarded_memory() -> None:
    queue = TensorQueue()
    async with (
        hops(1) as [first],
        TensorReceiver(queue, max_mapped_bytes=4 * MIB) as receiver,
        TensorSender(queue, arena_bytes=MIB) as sender,
    ):
        received = await first.pass_on(pattern(1, BIG))
        await sender.send(received)
        with pytest.raises(RefusedError, match="raise max_mapped_bytes, or send copies with"):
            await sender.drain()
        clone = received.clone()
        await sender.ready()
        assert torch.equal(await receiver.receive(await sender.send(clone)), pattern(1, BIG))
        assert receiver.statistics().mapped_bytes == MIB


@pytest.mark.promise(21, 39)
async def test_a_cancelled_send_of_a_large_received_tensor_releases_it() -> None:
    async with hops(2) as (first, second):
        received = await first.pass_on(torch.zeros(16 * MIB, dtype=torch.uint8))
        assert not received.any()  # with many pages in use, isolating them takes long
        sending = asyncio.create_task(second.sender.send(received))
        await asyncio.sleep(0)  # its pages are being isolated
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await idle(second)
        received += 1
        assert bool((await second.pass_on(received)).all())
        del received
        await idle(first, second)
