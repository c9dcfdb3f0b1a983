"""No call of a publisher or a subscriber blocks its loop, for 150 MiB and four subscribers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from aiotensor.broadcast import Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests import selection
from tests.broadcast.audiences import audience, idle
from tests.conformance.makers import pairs_over
from tests.conformance.turns import Lengths, measured, some_turns, too_long
from verification.processes import peers
from verification.waiting import until

_BYTES = 150 << 20
_PAGE = 4096
_SUBSCRIBERS = 4

pytestmark = [
    pytest.mark.parametrize("link", selection.LINKS),
    pytest.mark.parametrize("mode", ["plain"], indirect=True),  # the calls take as long in every mode
]


async def _too_long(link: str, measure: Callable[[Endpoint], Awaitable[Lengths]]) -> Lengths:
    """Measure at a new endpoint in each attempt."""

    async def attempt() -> Lengths:
        with pairs_over(link) as pairs:
            return await measure(pairs.endpoint)

    return await too_long(attempt)


async def test_no_call_of_a_publisher_blocks_its_loop(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(endpoint: Endpoint) -> Lengths:
        lengths: Lengths = {}
        async with audience(endpoint, _SUBSCRIBERS, history=1) as (publisher, children):
            with measured("allocate in fresh memory", lengths):
                allocated = await publisher.allocate((_BYTES,), torch.uint8)
            allocated.fill_(1)
            with measured("publish what was allocated", lengths):
                await publisher.publish(allocated)
            await _all(children, _take)
            del allocated
            with measured("publish by a copy, and forget the one before", lengths):
                await publisher.publish(source)
            await _all(children, _take)
            with measured("the subscribers free both", lengths):
                await _all(children, peers.forget_tensors)
                await until(lambda: not any(lag.held_bytes for lag in publisher.statistics().lags))
            with measured("publish what has to be gathered", lengths):
                await publisher.publish(source.view(-1, 2).t())
            await _all(children, _take)
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
        return lengths

    assert await _too_long(link, measure) == {}


async def test_dropped_and_cancelled_publications_do_not_block_the_loop(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(endpoint: Endpoint) -> Lengths:
        lengths: Lengths = {}
        async with audience(endpoint, 2, slow="drop", max_behind=1) as (publisher, children):
            await publisher.publish(source)
            with measured("drop a publication", lengths):
                await publisher.publish(b"next")
                await _all(children, _take_next)
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


async def test_no_call_of_a_subscriber_blocks_its_loop(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(endpoint: Endpoint) -> Lengths:
        lengths: Lengths = {}
        async with audience(endpoint, 1) as (publisher, [child]):
            # In a new process, since the first use of a function may import modules.
            receiving = child.start(_receive_measured)
            await publisher.publish(source)
            lengths |= await receiving
            receiving = child.start(_write_measured)
            await publisher.publish(source)
            lengths |= await receiving
            await publisher.publish(source)
            await child.call(_take)
            await publisher.publish(source)
            return {**lengths, **await child.call(_close_measured)}

    assert await _too_long(link, measure) == {}


async def test_the_end_of_a_publisher_does_not_block_its_subscribers(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(endpoint: Endpoint) -> Lengths:
        async with audience(endpoint, 1) as (publisher, [child]):
            await publisher.publish(source)
            await child.call(_take)
            ending = child.start(_end_measured)
            await publisher.aclose()
            return await ending

    assert await _too_long(link, measure) == {}


async def _all(children: list[peers.Peer], work: Callable[[peers.State], Awaitable[None]]) -> None:
    await asyncio.gather(*(child.call(work) for child in children))


def _subscriber(state: peers.State) -> Subscriber[torch.Tensor]:
    subscriber: Subscriber[torch.Tensor] = state.others["subscriber"]
    return subscriber


async def _take(state: peers.State) -> None:
    """Receive a tensor, and read each of its pages, which are mapped here from then on."""
    tensor = (await _subscriber(state).receive()).message
    assert int(tensor.view(-1)[::_PAGE].sum()) == _BYTES // _PAGE
    state.tensors.append(tensor)


async def _take_next(state: peers.State) -> None:
    assert (await state.others["subscriber"].receive()).message == b"next"


async def _freed(subscriber: Subscriber[torch.Tensor]) -> None:
    await until(lambda: subscriber.statistics().leases == 0)
    await some_turns()


async def _receive_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    subscriber = _subscriber(state)
    with measured("receive", lengths):
        publication = await subscriber.receive()
    assert int(publication.message[::_PAGE].sum()) == _BYTES // _PAGE
    with measured("free what was received", lengths):
        del publication
        await _freed(subscriber)
    return lengths


async def _write_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    subscriber = _subscriber(state)
    publication = await subscriber.receive()
    publication.message[::_PAGE] += 1  # which copies each page
    with measured("free what was written in place", lengths):
        del publication
        await _freed(subscriber)
    return lengths


async def _close_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    subscriber = _subscriber(state)
    await until(lambda: subscriber.statistics().unclaimed == 1)
    with measured("close with an untaken publication and a tensor", lengths):
        await subscriber.aclose()
    return lengths


async def _end_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    subscriber = _subscriber(state)
    with measured("the publisher closes", lengths):
        await until(lambda: not subscriber.statistics().publishers)
        await some_turns()
    with measured("free the last tensor of a publisher that closed", lengths):
        state.tensors.clear()
        await until(lambda: subscriber.statistics().mapped_bytes == 0)
        await some_turns()
    return lengths
