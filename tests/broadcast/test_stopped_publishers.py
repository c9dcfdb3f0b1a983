"""A publisher whose process is stopped, continued or killed, as its subscribers see it."""

import asyncio

import pytest
import torch

from aiotensor import PeerLostError, WouldBlockError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast import workers
from verification.patterns import BIG, pattern
from verification.processes.peers import peers
from verification.promptly import promptly
from verification.waiting import until


async def test_subscribers_of_a_stopped_publisher_wait_and_then_miss_nothing(endpoint: Endpoint) -> None:
    async with (
        peers(endpoint, 1) as [publisher],
        Subscriber(endpoint, torch.Tensor, max_wait_s=0.1) as impatient,
        Subscriber(endpoint, torch.Tensor) as patient,
    ):
        await publisher.call(workers.start, 2)
        await publisher.call(workers.publish, 2, BIG)
        for subscriber in (impatient, patient):
            await until(lambda subscriber=subscriber: subscriber.statistics().unclaimed == 2)  # type: ignore[misc]
        await publisher.stop()
        for subscriber in (impatient, patient):
            for number in range(2):  # these arrived before
                assert torch.equal((await subscriber.receive()).message, pattern(number, BIG))
        waiting = asyncio.create_task(patient.receive())
        with pytest.raises(WouldBlockError, match="is connected, but has published nothing since") as caught:
            await impatient.receive()
        assert type(caught.value) is WouldBlockError
        assert not waiting.done()
        publishing = publisher.start(workers.publish, 2, BIG)
        publisher.go_on()
        assert await publishing == 3
        await until(lambda: impatient.statistics().unclaimed == 2)
        publications = [await waiting, await impatient.receive()]
        publications += [await patient.receive(), await impatient.receive()]
        assert [(one.number, one.missed) for one in publications] == [(2, 0), (2, 0), (3, 0), (3, 0)]
        assert all(torch.equal(one.message, pattern(one.number, BIG)) for one in publications)
        del publications
        await publisher.finish()


async def test_a_stopped_publisher_can_be_killed_and_replaced(address: str) -> None:
    async with peers(address, 1) as [publisher], Subscriber(address, torch.Tensor) as subscriber:
        await publisher.call(workers.start, 1)
        await publisher.call(workers.publish, 1, BIG)
        kept = (await subscriber.receive()).message
        await publisher.stop()
        waiting = asyncio.create_task(subscriber.receive())
        await asyncio.sleep(0)
        publisher.kill()
        with promptly(), pytest.raises(PeerLostError, match="was lost"):
            await waiting
        await publisher.ended()  # and with it the socket that it listens at
        async with Publisher(address) as successor:
            receiving = asyncio.create_task(subscriber.receive())
            await successor.wait_for_subscribers(1)
            await successor.publish(pattern(7, BIG))
            publication = await receiving
            assert (publication.number, publication.missed) == (0, 0)
            assert torch.equal(publication.message, pattern(7, BIG))
        assert torch.equal(kept, pattern(0, BIG))


async def test_a_restarted_subscriber_receives_the_history_of_a_publisher(address: str) -> None:
    async with Publisher(address, history=2) as publisher:
        for round_ in range(3):
            async with peers(address, 1) as [child]:
                await child.call(workers.subscribe)
                await publisher.wait_for_subscribers(1)
                await publisher.publish(pattern(round_, BIG))
                first = max(0, round_ - 2)
                numbers = await child.call(workers.receive, round_ - first + 1, keep=True)
                assert numbers == list(range(first, round_ + 1))
                child.kill()
                await child.ended()
            with promptly():
                await until(lambda: not publisher.statistics().subscribers)
                await until(lambda: publisher.statistics().bytes_in_use <= 2 * (BIG * 8 + 4096))
