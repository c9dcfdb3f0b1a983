"""No operation on 150 MiB blocks the event loop, and idle objects do nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from aiotensor import TensorHandle, TensorSender
from aiotensor.broadcast import Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast.audiences import audience, idle
from tests.conformance.makers import PairMaker, pairs_over
from tests.conformance.turns import Lengths, measured, some_turns, too_long
from tests.selection import COMPLETE
from verification.processes import peers, watch
from verification.waiting import settled, until

_BYTES = 150 << 20
_PAGE = 4096
_MANY = list(torch.ones(2000, 9000, dtype=torch.uint8))
_GATHERED = torch.ones(_BYTES // 2, 3, dtype=torch.uint8)[:, 1:].t()  # its memory has gaps
_SUBSCRIBERS = 4

# What takes long takes as long in every mode and on both loops.
_once = pytest.mark.parametrize("mode", ["plain"], indirect=True)
_links = pytest.mark.parametrize("link", ["unix", "tcp"] if COMPLETE else ["unix"])


async def _too_long(link: str, measure: Callable[[PairMaker], Awaitable[Lengths]]) -> Lengths:
    """Measure with a new pair in each attempt."""

    async def attempt() -> Lengths:
        with pairs_over(link) as pairs:
            return await measure(pairs)

    return await too_long(attempt)


@pytest.mark.promise(19)
@_links
@_once
async def test_no_call_of_a_sender_keeps_the_loop_busy_for_long(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(pairs: PairMaker) -> Lengths:
        lengths: Lengths = {}
        async with pairs.near_sender() as (sender, engine):
            with measured("allocate in fresh memory", lengths):
                allocated = await sender.allocate((_BYTES,), torch.uint8)
            allocated.fill_(1)
            with measured("send what was allocated", lengths):
                handle = await sender.send(allocated)
            await engine.call(_take, handle)
            await engine.call(peers.forget_tensors)
            with measured("free what was allocated", lengths):
                del allocated
                await settled(sender)
            with measured("send by a copy", lengths):
                handle = await sender.send(source)
            with measured("discard", lengths):
                sender.discard(handle)
                await settled(sender)
            sending = asyncio.create_task(sender.send(source))
            with measured("cancel a send", lengths):
                await until(lambda: sender.statistics().bytes_in_use == _BYTES)
                sending.cancel()
                await settled(sender)
            with measured("send what has to be gathered", lengths):
                handle = await sender.send(_GATHERED)
            await engine.call(_take, handle)
            with measured("close", lengths):
                await sender.aclose()
            await engine.call(peers.forget_tensors)

            async with TensorSender(pairs.endpoint) as sender:
                await engine.call(_take, await sender.send(source))
                closing = asyncio.create_task(sender.aclose())
                with measured("cancel aclose", lengths):
                    await asyncio.sleep(0)
                    closing.cancel()
                    await asyncio.wait([closing])
                    await some_turns()
            await engine.call(peers.forget_tensors)

            async with TensorSender(pairs.endpoint) as sender:
                await engine.call(_take, await sender.send(source))
                with measured("the receiver dies", lengths):
                    engine.kill()
                    await until(lambda: sender.statistics().receivers_lost == 1)
                    await some_turns()
        return lengths

    assert await _too_long(link, measure) == {}


@pytest.mark.promise(19)
@_links
@_once
async def test_no_call_of_a_receiver_keeps_the_loop_busy_for_long(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(pairs: PairMaker) -> Lengths:
        async with pairs.near_sender() as (sender, engine):
            # In a new process, since the first use of a function may import modules.
            handles = [await sender.send(source) for _ in range(3)]
            lengths = await engine.call(_receive_measured, *handles)
            await engine.call(_take, await sender.send(source))
            leaving = engine.start(_a_sender_leaves_measured)
            await sender.aclose()
            lengths |= await leaving
            async with TensorSender(pairs.endpoint) as sender:
                await engine.call(_take, await sender.send(source))
                await engine.call(peers.forget_tensors)
                return {**lengths, **await engine.call(_close_measured)}

    assert await _too_long(link, measure) == {}


async def _take(state: peers.State, handle: TensorHandle) -> None:
    """Take a tensor, and read all of it: from then on the memory is mapped here, page by page."""
    tensor = await state.receiver.receive(handle)
    assert int(tensor.sum()) == _BYTES
    state.tensors.append(tensor)


async def _receive_measured(
    state: peers.State, copied: TensorHandle, viewed: TensorHandle, discarded: TensorHandle
) -> Lengths:
    lengths: Lengths = {}
    with measured("receive a copy", lengths):
        state.tensors.append(await state.receiver.receive(copied, copy=True))
    with measured("receive", lengths):
        tensor = await state.receiver.receive(viewed)
    assert int(tensor.sum()) == _BYTES
    with measured("free what was received", lengths):
        del tensor
        await until(lambda: state.receiver.statistics().leases == 1)
        await some_turns()
    with measured("discard at the receiver", lengths):
        state.receiver.discard(discarded)
        await until(lambda: state.receiver.statistics().leases == 0)
        await some_turns()
    return lengths


async def _a_sender_leaves_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    with measured("the sender leaves", lengths):
        await until(lambda: state.receiver.statistics().senders == 0)
        await some_turns()
    with measured("free the last tensor of a sender that left", lengths):
        state.tensors.pop()
        await until(lambda: state.receiver.statistics().mapped_bytes == 0)
        await some_turns()
    return lengths


async def _close_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    with measured("close the receiver", lengths):
        await state.receiver.aclose()
    return lengths


@pytest.mark.promise(19)
@_links
@_once
async def test_no_call_of_a_publisher_keeps_the_loop_busy_for_long(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(pairs: PairMaker) -> Lengths:
        lengths: Lengths = {}
        endpoint = pairs.endpoint
        async with audience(endpoint, _SUBSCRIBERS, history=1) as (publisher, children):
            with measured("allocate in fresh memory", lengths):
                allocated = await publisher.allocate((_BYTES,), torch.uint8)
            allocated.fill_(1)
            with measured("publish what was allocated", lengths):
                await publisher.publish(allocated)
            await _all(children, _take_next)
            del allocated
            with measured("publish by a copy, and forget the one before", lengths):
                await publisher.publish(source)
            await _all(children, _take_next)
            with measured("the subscribers free both", lengths):
                await _all(children, peers.forget_tensors)
                await until(lambda: not any(lag.held_bytes for lag in publisher.statistics().lags))
            with measured("publish what has to be gathered", lengths):
                await publisher.publish(_GATHERED)
            await _all(children, _take_next)
            with measured("a subscriber dies", lengths):
                children[0].kill()
                await until(lambda: publisher.statistics().subscribers == _SUBSCRIBERS - 1)
                await some_turns()
            with measured("a late subscriber receives the history", lengths):
                async with Subscriber[Any](endpoint) as late:
                    await late.receive()
                await some_turns()
            with measured("close", lengths):
                await publisher.aclose()

        async with audience(endpoint, 2, slow="drop", max_behind=1) as (publisher, children):
            with measured("publish many tensors", lengths):
                await publisher.publish(_MANY)
            await _all(children, _take_many)
            await publisher.publish(source)
            with measured("drop a publication", lengths):
                await publisher.publish(b"next")
                await _all(children, _take_message)
                await idle(publisher)
            publishing = asyncio.create_task(publisher.publish(source))
            with measured("cancel a publication", lengths):
                await until(lambda: publisher.statistics().bytes_in_use > 0)
                publishing.cancel()
                await asyncio.wait([publishing])
                await idle(publisher)
            assert publishing.cancelled()
        return lengths

    assert await _too_long(link, measure) == {}


@pytest.mark.promise(19)
@_links
@_once
async def test_no_call_of_a_subscriber_keeps_the_loop_busy_for_long(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(pairs: PairMaker) -> Lengths:
        lengths: Lengths = {}
        # In new processes, since the first use of a function may import modules.
        async with audience(pairs.endpoint, 2) as (publisher, [first, second]):
            for write in (False, True):
                receiving = first.start(_receive_publication_measured, write=write)
                await publisher.publish(source)
                lengths |= await receiving
                await second.call(_take_next)
                await second.call(peers.forget_tensors)
            await publisher.publish(source)
            await _all([first, second], _take_next)
            await publisher.publish(source)
            lengths |= await first.call(_close_subscriber_measured)
            await second.call(_take_next)
            ending = second.start(_the_publisher_leaves_measured)
            await publisher.aclose()
            return {**lengths, **await ending}

    assert await _too_long(link, measure) == {}


async def _all(children: list[peers.Peer], work: Callable[[peers.State], Awaitable[None]]) -> None:
    await asyncio.gather(*(child.call(work) for child in children))


def _subscriber(state: peers.State) -> Subscriber[torch.Tensor]:
    subscriber: Subscriber[torch.Tensor] = state.others["subscriber"]
    return subscriber


async def _take_next(state: peers.State) -> None:
    """Receive a tensor, and read each of its pages, which are mapped here from then on."""
    tensor = (await _subscriber(state).receive()).message
    assert int(tensor.view(-1)[::_PAGE].sum()) == _BYTES // _PAGE
    state.tensors.append(tensor)


async def _take_many(state: peers.State) -> None:
    assert len((await state.others["subscriber"].receive()).message) == len(_MANY)


async def _take_message(state: peers.State) -> None:
    assert (await state.others["subscriber"].receive()).message == b"next"


async def _receive_publication_measured(state: peers.State, *, write: bool) -> Lengths:
    lengths: Lengths = {}
    subscriber = _subscriber(state)
    with measured("receive", lengths):
        publication = await subscriber.receive()
    assert int(publication.message[::_PAGE].sum()) == _BYTES // _PAGE
    if write:
        publication.message[::_PAGE] += 1  # which copies each page
    with measured("free what was written in place" if write else "free what was received", lengths):
        del publication
        await until(lambda: subscriber.statistics().leases == 0)
        await some_turns()
    return lengths


async def _close_subscriber_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    subscriber = _subscriber(state)
    await until(lambda: subscriber.statistics().unclaimed == 1)
    with measured("close with an untaken publication and a tensor", lengths):
        await subscriber.aclose()
    return lengths


async def _the_publisher_leaves_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    subscriber = _subscriber(state)
    with measured("the publisher closes", lengths):
        await until(lambda: not subscriber.statistics().publishers)
        await some_turns()
    with measured("free the last tensors of a publisher that closed", lengths):
        state.tensors.clear()
        await until(lambda: subscriber.statistics().mapped_bytes == 0)
        await some_turns()
    return lengths


@pytest.mark.promise(20)
@_once
async def test_an_idle_sender_and_receiver_use_no_processor_time(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 2) as [engine, api]:
        await engine.call(peers.open_receiver)
        await api.call(peers.open_sender)
        for count in (10, 100_000):
            handle: TensorHandle = await api.call(peers.send_pattern, 0, count)
            assert await engine.call(peers.receive_pattern, handle, 0)
        await api.call(peers.drain)
        assert await watch.become_idle([engine.pid, api.pid])
