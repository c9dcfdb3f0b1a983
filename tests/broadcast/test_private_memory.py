"""Subscribers write into the tensors that they receive, and no other subscriber sees it."""

import pytest
import torch

from aiotensor.broadcast import Publisher
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast import workers
from tests.broadcast.audiences import Broadcasts, idle
from verification.patterns import BIG, pattern
from verification.processes.peers import peers

LARGE = 1_000_000  # elements, so that a worker drops the copied pages


@pytest.mark.promise(35)
@pytest.mark.parametrize("size", [2000, LARGE])
async def test_the_next_publication_in_the_same_memory_arrives_unchanged(
    broadcasts: Broadcasts, size: int
) -> None:
    """The pages that a subscriber has copied by writing must not hide the new values."""
    async with broadcasts.open(2, torch.Tensor, arena_bytes=size * 8 + 8192) as (publisher, subscribers):
        for seed in range(6):
            await publisher.publish(pattern(seed, size))
            for subscriber in subscribers:
                message = (await subscriber.receive()).message
                assert torch.equal(message, pattern(seed, size))
                message[:: 1 + seed * 100] = -1
                del message
        await idle(publisher)


@pytest.mark.promise(35)
async def test_writes_of_a_process_are_invisible_to_others_and_to_the_publisher(endpoint: Endpoint) -> None:
    """Two processes write to each tensor as soon as they have it, and two others check its values."""
    async with peers(endpoint, 4) as children, Publisher(endpoint, arena_bytes=8 << 20) as publisher:
        for child in children:
            await child.call(workers.subscribe)
        await publisher.wait_for_subscribers(4)
        writing = [child.start(workers.receive, 40) for child in children[:2]]
        checking = [child.start(workers.receive_for_ever) for child in children[2:]]
        for number in range(40):
            tensor = await publisher.allocate((BIG,), torch.int64)
            tensor[:] = pattern(number, BIG)
            await publisher.publish(tensor)
            if number % 10 == 9:
                await publisher.drain()
                assert torch.equal(tensor, pattern(number, BIG))
            del tensor
        assert [await numbers for numbers in writing] == [list(range(40))] * 2
        await publisher.aclose()
        assert [await count for count in checking] == [40, 40]


@pytest.mark.parametrize("endpoint", ["unix"], indirect=True)
async def test_a_written_part_does_not_change_its_neighbours(broadcasts: Broadcasts) -> None:
    """Two tensors of one block share a page: it is dropped after both were freed, and not before."""
    async with broadcasts.open(1, list[torch.Tensor]) as (publisher, [subscriber]):
        tensor = await publisher.allocate((10_000,), torch.int64)
        tensor[:] = pattern(1, 10_000)
        await publisher.publish([tensor[:4999], tensor[4999:]])
        first, second = (await subscriber.receive()).message
        second[:] = 5
        first[-1] = 6
        del first
        for _ in range(20):
            await publisher.publish([])
            await subscriber.receive()
        assert torch.equal(second, torch.full_like(second, 5))
        del second, tensor
        await idle(publisher)
