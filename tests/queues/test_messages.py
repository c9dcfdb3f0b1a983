"""Messages, capacity, timeouts and cancellation, with producers and consumers in this process."""

import asyncio
import errno
import gc
import os
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch

from aiotensor import (
    ClosedError,
    PeerLostError,
    RemoteError,
    TooLargeError,
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from aiotensor.channel.server import MessageServer
from aiotensor.queues import ConsumerStatistics, ProducerStatistics
from aiotensor.runtime import outage
from tests.cancellation.situations import SLOW
from tests.cancelling import Attempt, cancel_everywhere
from tests.queues.parties import check, inner, message, opened, queue_of
from verification.inside import held_by_client
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Video(msgspec.Struct):
    name: str
    frames: torch.Tensor


async def test_messages_arrive_in_order_as_they_were_at_put() -> None:
    async with opened(max_messages=16) as ends:

        async def produce() -> None:
            for number in range(21):
                one = message(number, (1, 3000, BIG)[number % 3])
                await ends.producer.put(one)
                one["number"] = -1
                one["tags"].clear()
                one["frames"].zero_()

        producing = asyncio.create_task(produce())
        assert [check(await ends.consumer.get(timeout=60)) for _ in range(21)] == list(range(21))
        await producing
        for what in (None, 5, "text", [1, "a"]):
            await ends.producer.put(what)
            assert await ends.consumer.get() == what
        await ends.producer.put(torch.arange(7))
        assert torch.equal(await ends.consumer.get(), torch.arange(7))
    async with opened(message_type=Video) as typed:
        await typed.producer.put(Video("a", pattern(1, BIG)))
        got = await typed.consumer.get()
        assert isinstance(got, Video)
        assert torch.equal(got.frames, pattern(1, BIG))


class Positive(msgspec.Struct):
    """A message whose type refuses some values with an error of its own."""

    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise KeyError(self.number)


@pytest.mark.promise(40)
async def test_a_message_that_its_type_refuses_is_reported_once_and_the_others_arrive() -> None:
    with queue_of(message_type=Positive) as queue:
        async with queue.consumer() as consumer, queue.producer() as producer:
            for number in (0, -1, 2, "3", 4):
                await producer.put({"number": number})
            assert [(await consumer.get(timeout=60)).number for _ in range(3)] == [0, 2, 4]
            with pytest.raises(RemoteError, match="KeyError: -1"):
                await producer.join()
            with pytest.raises(RemoteError, match="Expected `int`, got `str`"):
                producer.put_nowait({"number": 5})
            await producer.put({"number": 6})
            assert (await consumer.get(timeout=60)).number == 6
            await producer.join()


async def test_closing_a_producer_reports_a_refused_message_after_the_others_were_taken() -> None:
    with queue_of(message_type=Positive) as queue:
        async with queue.consumer() as consumer:
            producer = await queue.producer().__aenter__()
            for number in (-1, 1, 2):
                await producer.put({"number": number})
            closing = asyncio.create_task(producer.aclose())
            assert [(await consumer.get(timeout=60)).number for _ in range(2)] == [1, 2]
            with pytest.raises(RemoteError, match="KeyError"):
                await closing
            with pytest.raises(PeerLostError, match="1 of the 1 producers"):
                await consumer.get()


async def test_put_waits_while_max_messages_are_in_the_queue() -> None:
    async with opened(max_messages=2) as ends:
        await ends.producer.put(message(0))
        ends.producer.put_nowait(message(1))
        with pytest.raises(WouldBlockError, match="max_messages=2") as caught:
            await ends.producer.put(message(8), timeout=0.01)
        assert caught.value.messages.limit == 2
        with pytest.raises(WouldBlockError):
            ends.producer.put_nowait(message(9))
        waiting = [asyncio.create_task(ends.producer.put(message(number))) for number in (2, 3)]
        await until(lambda: ends.producer.statistics().waiting == 2)
        assert check(await ends.consumer.get()) == 0
        await waiting[0]
        assert not waiting[1].done()
        assert [check(await ends.consumer.get()) for _ in range(3)] == [1, 2, 3]
        await waiting[1]
        await ends.producer.join()
        assert ends.producer.statistics() == ProducerStatistics(2, 0, 2, 0, 4, 0)


async def test_get_waits_until_its_timeout_or_a_message() -> None:
    async with opened() as ends:
        for timeout in (0, 0.01):
            with pytest.raises(WouldBlockError, match="no message has arrived"):
                await ends.consumer.get(timeout=timeout)
        with pytest.raises(WouldBlockError):
            ends.consumer.get_nowait()
        getting = asyncio.create_task(ends.consumer.get())
        await asyncio.sleep(0)
        await ends.producer.put(message(1))
        assert check(await getting) == 1


async def test_timeouts_name_the_producers_and_consumers_that_were_not_opened() -> None:
    with queue_of(producers=3, consumers=2, max_messages=1) as queue:
        async with queue.producer() as producer:
            await producer.put(1)
            with pytest.raises(WouldBlockError, match="no consumer of this queue was opened yet"):
                await producer.put(2, timeout=0)
            async with queue.consumer() as consumer:
                assert await consumer.get() == 1
                with pytest.raises(WouldBlockError, match="producers opened so far: 1 of 3"):
                    await consumer.get(timeout=0)


@pytest.mark.promise(40)
async def test_a_long_wait_for_producers_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_FIRST_LINE_S", 0.1)
    async with opened(producers=2) as ends:
        getting = asyncio.create_task(ends.consumer.get())
        await until(lambda: "producers opened so far: 1 of 2. Start the others" in caplog.text)
        getting.cancel()
        await asyncio.wait([getting])


async def test_a_message_wakes_one_of_the_waiting_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, real = 0, MessageServer._take

    async def take(self: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        return await real(self, **options)

    async with opened(message_type=int) as ends:
        getting = [asyncio.create_task(ends.consumer.get()) for _ in range(1000)]
        await asyncio.sleep(0)
        monkeypatch.setattr(MessageServer, "_take", take)
        for number in range(1000):
            await ends.producer.put(number)
        assert sorted(await asyncio.gather(*getting)) == list(range(1000))
        assert looks < 2000


@pytest.mark.parametrize("many", [1, 5000])
async def test_get_nowait_returns_a_message_that_has_arrived(many: int) -> None:
    async with opened() as ends:
        await ends.producer.put({"many": ["text"] * many, "tensor": pattern(1, BIG)})
        await until(lambda: ends.consumer.statistics().messages == 1)
        got: Any = []
        while not got:
            with suppress(WouldBlockError):
                got = ends.consumer.get_nowait()
            await asyncio.sleep(0)
        assert len(got["many"]) == many
        assert torch.equal(got["tensor"], pattern(1, BIG))
        assert ends.consumer.statistics() == ConsumerStatistics(0, 1)


async def test_join_and_closing_wait_until_messages_were_taken() -> None:
    with queue_of() as queue:
        async with queue.consumer() as consumer:
            producer = await queue.producer().__aenter__()
            await producer.put(message(1))
            joining = asyncio.create_task(producer.join())
            closing = asyncio.create_task(producer.aclose())
            await asyncio.sleep(0)
            with pytest.raises(ClosedError, match="QueueProducer was closed"):
                await producer.put(message(2))
            assert not joining.done()
            assert not closing.done()
            assert check(await consumer.get()) == 1
            await joining
            await closing
            with pytest.raises(ClosedError, match=r"all producers of this queue have closed \(producers=1\)"):
                await consumer.get()
            with pytest.raises(ClosedError):
                consumer.get_nowait()
            assert [got async for got in consumer] == []


async def test_messages_of_a_consumer_that_closes_go_to_another_one() -> None:
    with queue_of(consumers=2, max_messages=4) as queue:
        async with queue.consumer() as staying, queue.producer() as producer:
            async with queue.consumer() as leaving:
                for number in range(4):
                    await producer.put(message(number))
                await until(lambda: leaving.statistics().messages == staying.statistics().messages == 2)
            assert {check(await staying.get()) for _ in range(4)} == {0, 1, 2, 3}
            await producer.join()
            assert producer.statistics().redelivered == 2


async def test_a_producer_block_that_raises_drops_its_messages_and_is_reported() -> None:
    with queue_of(producers=2) as queue:
        async with queue.consumer() as consumer:
            with pytest.raises(KeyError):
                async with queue.producer() as producer:
                    await producer.put(message(1))
                    raise KeyError
            async with queue.producer():
                pass
            with pytest.raises(PeerLostError, match="1 of the 2 producers of this queue ended without"):
                while True:
                    await consumer.get()
            async with queue.producer() as replacement:
                await replacement.put(message(2))
                assert check(await consumer.get()) == 2
            assert [got async for got in consumer] == []


async def test_when_the_last_consumer_has_ended_producers_wait_for_grace_s() -> None:
    with queue_of(grace_s=0, max_messages=1) as queue:
        producer = await queue.producer().__aenter__()
        async with queue.consumer() as consumer:
            await producer.put(message(1))
            waiting = asyncio.create_task(producer.put(message(2)))
            await until(lambda: consumer.statistics().messages == producer.statistics().waiting == 1)
        for call in (waiting, producer.join(), producer.put(message(3)), producer.aclose()):
            with pytest.raises(PeerLostError, match="none has opened for 0 s"):
                await call


@pytest.mark.promise(21)
async def test_a_put_cancelled_at_any_suspension_is_queued_or_not_at_all() -> None:
    async with opened(max_messages=1) as ends:
        client, server = inner(ends)
        box: dict[str, Any] = {"many": ["text"] * 20_000, "tensor": pattern(1, SLOW)}

        async def attempt(attempt: Attempt) -> None:
            await ends.producer.put(0)
            putting = attempt.start(ends.producer.put(box))
            await putting.until(lambda: ends.producer.statistics().waiting)
            assert await ends.consumer.get() == 0
            if await putting.completed():
                assert torch.equal((await ends.consumer.get())["tensor"], box["tensor"])
            await ends.producer.join()
            assert ends.producer.statistics().messages == server.statistics().waiting == 0

        assert await cancel_everywhere(attempt, client, server)


@pytest.mark.parametrize("many", [1, 20_000])
async def test_a_get_cancelled_at_any_suspension_loses_no_message(many: int) -> None:
    async with opened() as ends:
        client, server = inner(ends)

        async def attempt(attempt: Attempt) -> None:
            getting = attempt.start(ends.consumer.get())
            box = {"many": ["text"] * many, "tensor": pattern(2, BIG)}
            await getting.bring(lambda: ends.producer.put_nowait(box))
            got = getting.value if await getting.completed() else await ends.consumer.get()
            assert torch.equal(got["tensor"], pattern(2, BIG))
            await ends.producer.join()

        assert await cancel_everywhere(attempt, client, server)


async def test_cancelling_the_close_of_a_producer_drops_its_messages() -> None:
    with queue_of() as queue:
        producer = await queue.producer().__aenter__()
        await producer.put(message(1))
        closing = asyncio.create_task(producer.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        async with queue.consumer() as consumer:
            with pytest.raises(PeerLostError, match="without closing"):
                await consumer.get()


async def test_a_get_that_waits_raises_when_its_consumer_closes() -> None:
    with queue_of() as queue:
        consumer = await queue.consumer().__aenter__()
        getting = asyncio.create_task(consumer.get())
        iterating = asyncio.create_task(anext(consumer, "the end"))
        await asyncio.sleep(0)
        await consumer.aclose()
        with pytest.raises(ClosedError, match="QueueConsumer was closed"):
            await getting
        assert await iterating == "the end"


async def test_messages_that_can_never_be_sent_raise_at_put() -> None:
    async with opened(arena_bytes=1 << 16, max_body_bytes=1000) as ends:
        for put in (ends.producer.put, ends.producer.put_nowait):
            for error, what in (
                (TooLargeError, torch.zeros(1 << 17, dtype=torch.uint8)),
                (TooLargeError, "x" * 2000),
                (TypeError, object()),
                (UnsupportedTensorError, torch.zeros(3, device="meta")),
            ):
                with pytest.raises(error):
                    result: Any = put(what)
                    await result
        assert ends.producer.statistics().messages == 0
        with pytest.raises(ValueError, match="timeout"):
            await ends.producer.put(1, timeout=-1)
        with pytest.raises(ValueError, match="timeout"):
            await ends.consumer.get(timeout=-1)


async def test_a_put_nowait_that_finds_no_memory_raises_os_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with opened() as ends:
        for call, count in (("memfd_create", BIG), ("posix_fallocate", 4 * BIG)):
            with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
                patch.setattr(os, call, refuse)
                ends.producer.put_nowait(pattern(1, count))
            assert not any(held_by_client(inner(ends)[0]).values())
            ends.producer.put_nowait(pattern(2, BIG))
            assert torch.equal(await ends.consumer.get(), pattern(2, BIG))
            await until(lambda: not any(held_by_client(inner(ends)[0]).values()))


async def test_objects_that_are_not_open_raise_usage_error() -> None:
    with queue_of() as queue:
        for call in (queue.producer().put(1), queue.producer().join(), queue.consumer().get()):
            with pytest.raises(UsageError, match="not open yet"):
                await call
        producer = queue.producer()
        assert producer.statistics().max_messages == 8
        assert queue.consumer().statistics() == ConsumerStatistics(0, 0)
        await producer.aclose()
        with pytest.raises(ClosedError):
            await producer.__aenter__()


async def test_unclosed_objects_warn_and_are_closed() -> None:
    with queue_of() as queue:
        for make in (queue.producer, queue.consumer):
            with pytest.warns(ResourceWarning, match="unclosed <Queue"):
                await _open_and_forget(make)


async def _open_and_forget(make: Any) -> None:
    await make().__aenter__()
    gc.collect()
    for _ in range(5):
        await asyncio.sleep(0)
