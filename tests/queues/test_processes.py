"""Producers and consumers in several processes, which are killed and replaced."""

import asyncio
from itertools import chain
from typing import Any

import pytest

from aiotensor import PeerLostError
from tests.queues.parties import (
    check,
    close,
    get,
    message,
    open_consumer,
    open_producer,
    process,
    put,
    queue_of,
    take_all,
)
from verification.processes.peers import State
from verification.promptly import promptly
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def _waiting(state: State, count: int) -> None:
    """Wait until so many messages have arrived in the consumer."""
    await until(lambda: state.others["consumer"].statistics().messages == count)


async def test_messages_pass_between_processes_until_all_producers_have_closed() -> None:
    with queue_of(producers=2, consumers=2) as queue:
        async with process() as first, process() as second, process() as other, queue.producer() as own:
            for consumer in (first, second):
                await consumer.call(open_consumer, queue)
            await other.call(open_producer, queue)
            taking = [consumer.start(take_all) for consumer in (first, second)]
            await other.call(put, list(range(10)))
            for number in range(10, 20):
                await own.put(message(number))
            await own.aclose()
            assert not any(one.done() for one in taking)
            await other.call(close)
            with promptly():
                numbers = await asyncio.gather(*taking)
            assert sorted(chain(*numbers)) == list(range(20))
            for consumer in (first, second):
                await consumer.call(close)


@pytest.mark.promise(10)
async def test_untaken_messages_of_a_killed_consumer_go_to_another_one() -> None:
    with queue_of(consumers=2) as queue:
        async with process() as killed, queue.consumer() as consumer, queue.producer() as producer:
            await killed.call(open_consumer, queue)
            for number in range(5):
                await producer.put(message(number))
            await killed.call(_waiting, 2)
            [taken] = await killed.call(get, 1)
            await killed.call(_waiting, 2)
            killed.kill()
            with promptly():
                numbers = {check(await consumer.get()) for _ in range(4)}
            assert numbers == set(range(5)) - {taken}
            await producer.join()
            assert producer.statistics().redelivered == 2


async def test_without_redelivery_a_killed_consumer_raises_at_its_producer() -> None:
    with queue_of(redeliver=False) as queue:
        async with process() as killed:
            producer = await queue.producer().__aenter__()
            await killed.call(open_consumer, queue)
            await producer.put(message(1))
            await killed.call(_waiting, 1)
            killed.kill()
            with promptly():
                with pytest.raises(PeerLostError) as caught:
                    await producer.join()
                assert caught.value.pid == killed.pid
                with pytest.raises(PeerLostError):
                    await producer.aclose()


@pytest.mark.promise(10)
async def test_a_killed_producer_is_reported_after_the_messages_of_the_others() -> None:
    with queue_of(producers=2) as queue:
        async with process() as killed, queue.consumer() as consumer, queue.producer() as producer:
            await killed.call(open_producer, queue)
            await killed.call(put, [100, 101])
            await until(lambda: consumer.statistics().messages == 2)
            assert check(await consumer.get()) == 100
            killed.kill()
            await killed.ended()
            for number in range(3):
                await producer.put(message(number))
            assert sorted([check(await consumer.get()) for _ in range(4)]) == [0, 1, 2, 101]
            getting = asyncio.create_task(consumer.get())
            await producer.aclose()
            with (
                promptly(),
                pytest.raises(PeerLostError, match="1 of the 2 producers of this queue ended"),
            ):
                await getting
            with pytest.raises(PeerLostError, match="1 of the 2"):
                await anext(consumer)


async def test_a_producer_that_is_killed_before_it_connects_is_noticed() -> None:
    with queue_of() as queue:
        async with process() as killed:
            await killed.call(open_producer, queue)
            killed.kill()
            await killed.ended()
        async with queue.consumer() as consumer:
            with promptly(), pytest.raises(PeerLostError):
                await consumer.get()


@pytest.mark.extended
async def test_every_process_of_a_queue_may_be_killed_repeatedly() -> None:
    with queue_of(producers=2, consumers=2) as queue:
        numbers: list[int] = []

        async def consume(consumer: Any) -> None:
            while True:
                numbers.append(check(await consumer.get()))

        async with queue.consumer() as consumer, queue.producer() as producer:
            for start in range(0, 16, 4):
                async with process() as other_consumer, process() as other_producer:
                    await other_consumer.call(open_consumer, queue)
                    await other_producer.call(open_producer, queue)
                    other_producer.start(put, list(range(1000, 2000)))
                    for number in range(start, start + 4):
                        await producer.put(message(number))
                    await other_consumer.call(_waiting_any)
                    other_consumer.kill()
                    other_producer.kill()
                    consuming = asyncio.create_task(consume(consumer))
                    with promptly(3):
                        await producer.join()
                    consuming.cancel()
                    await asyncio.wait([consuming])
        assert {number for number in numbers if number < 1000} == set(range(16))


async def _waiting_any(state: State) -> None:
    await until(lambda: state.others["consumer"].statistics().messages > 0)
