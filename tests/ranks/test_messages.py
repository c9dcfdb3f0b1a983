"""Messages arrive in order, complete, with their values, in both directions."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from aiotensor import TooLargeError, UnsupportedTensorError
from aiotensor.memory.tensors import MAX_INLINE_BYTES
from aiotensor.protocol.frames import MAX_FRAMES
from aiotensor.transports.base import MAX_UNREAD_BYTES
from tests.ranks.pipes import ends, in_every_mode
from tests.selection import COMPLETE
from tests.steps import Count, Resumed
from tests.test_values import random_bits, same_bits
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = [
    pytest.mark.usefixtures("route"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

# Elements of int64, one size for each way: in a frame, with a frame (between machines), and in a segment.
_FEW, _SOME, _MANY = 100, 5_000, MAX_INLINE_BYTES // 8 + 1
_SMALL = 1_000  # in the frame
_IN_FLIGHT = 4  # so many that later messages of one iteration share a record

_COUNTS = [0, 1, _FEW, _SOME, BIG, MAX_INLINE_BYTES // 8, _MANY]


@in_every_mode
async def test_tensors_of_each_size_and_none_arrive_in_both_directions() -> None:
    async with ends() as (low, high):
        for sender, receiver in ((low, high), (high, low)):
            for count in (None, *_COUNTS, None, None):
                await sender.send(None if count is None else pattern(count, count))
                received = await receiver.receive()
                assert (received is None) == (count is None)
                assert received is None or torch.equal(received, pattern(received.numel(), received.numel()))


async def test_values_strides_gradients_and_parameters_arrive_as_such() -> None:
    async with ends() as (low, high):
        for shape in ((12, 6), (1200, 600)):  # in the frame, and in a segment
            sources = [
                random_bits(torch.float8_e4m3fn, shape),
                random_bits(torch.complex128, shape).t(),
                torch.ones(shape, requires_grad=True),
                Parameter(torch.ones(shape), requires_grad=False),
            ]
            for source in sources:
                await low.send(source)
                received = await high.receive()
                assert received is not None
                assert same_bits(received.detach(), source.detach())
                assert (type(received), received.requires_grad) == (type(source), source.requires_grad)
                assert received.stride() == source.stride()


@settings(max_examples=50 if COMPLETE else 8)
@given(st.lists(st.sampled_from([None, *_COUNTS]), max_size=12), st.integers(0, 2**32))
async def test_concurrent_sends_arrive_in_the_order_of_the_calls(counts: list[int | None], seed: int) -> None:
    async with ends() as (low, high):
        messages = [None if count is None else pattern(seed % 1000, count) for count in counts]
        sending = [asyncio.ensure_future(low.send(message)) for message in messages]
        for message in messages:
            received = await high.receive()
            assert (received is None) == (message is None)
            assert received is None or message is None or torch.equal(received, message)
        await asyncio.gather(*sending)


async def test_a_message_wakes_one_of_the_waiting_calls() -> None:
    async with ends() as (low, high):
        resumed = Count()

        async def take() -> torch.Tensor | None:
            return await Resumed(high.receive(), resumed)

        taking = [asyncio.create_task(take()) for _ in range(300)]
        await asyncio.sleep(0)
        for number in range(300):
            await low.send(torch.tensor(number))
        assert [int(found) for one in taking if (found := await one) is not None] == list(range(300))
        assert resumed.number < 2 * len(taking)


async def test_a_message_goes_to_another_call_if_the_one_that_it_woke_is_cancelled() -> None:
    async with ends() as (low, high):
        for turns in range(12):
            first, second = [asyncio.create_task(high.receive()) for _ in range(2)]
            await asyncio.sleep(0)
            await low.send(torch.tensor(turns))
            for _ in range(turns):
                await asyncio.sleep(0)
            got = first if not first.cancel() else second
            async with asyncio.timeout(10):
                found = await got
            assert found is not None
            assert int(found) == turns
            second.cancel()
            await asyncio.wait([first, second])


async def test_the_source_may_change_as_soon_as_send_has_returned() -> None:
    async with ends() as (low, high):
        for count in (_FEW, _SOME, BIG, _MANY):
            for seed in (3, 4):  # the first in fresh memory, the second in warm
                source, other = pattern(seed + 10, count), pattern(seed + 20, count)
                await low.send(other)
                other.fill_(-1)
                await low.send(source)
                source.fill_(-1)
                for expected in (seed + 20, seed + 10):
                    received = await high.receive()
                    assert received is not None
                    assert torch.equal(received, pattern(expected, count))
                    del received


async def test_a_tensor_that_cannot_be_sent_acquires_no_resources() -> None:
    async with ends(max_bytes=1 << 20) as (low, high):
        for wrong in (torch.ones(3).to_sparse(), torch.empty(3, device="meta")):
            with pytest.raises(UnsupportedTensorError):
                await low.send(wrong)
        with pytest.raises(TooLargeError) as caught:
            await low.send(torch.empty((1 << 20) + 1, dtype=torch.uint8))
        assert (caught.value.limit, caught.value.requested) == (1 << 20, (1 << 20) + 1)
        statistics = low.statistics()
        assert (statistics.in_flight, statistics.bytes_in_use) == (0, 0)
        assert statistics.errors == {"UnsupportedTensorError": 2, "TooLargeError": 1}
        await low.send(torch.empty(1 << 20, dtype=torch.uint8))  # as large as possible
        assert await high.receive() is not None


# So many small messages leave space in the record for the tensor, but perhaps not for the answer, too.
@pytest.mark.parametrize("count", range(MAX_FRAMES - 2, MAX_FRAMES + 1))
async def test_a_tensor_arrives_after_small_messages_that_fill_a_record_with_an_answer(count: int) -> None:
    async with ends() as (low, high):
        for _ in range(_IN_FLIGHT):
            await low.send(None)
        await high.send(None)
        await until(lambda: high.statistics().unclaimed == _IN_FLIGHT)
        assert await low.receive() is None  # the answer is written with the next record
        for _ in range(count):
            await low.send(None)
        await low.send(pattern(count, _SOME))
        for _ in range(_IN_FLIGHT + count):
            assert await high.receive() is None
        received = await high.receive()
        assert received is not None
        assert torch.equal(received, pattern(count, _SOME))


@pytest.mark.parametrize("sends", ["low", "high"])
async def test_messages_within_max_bytes_wait_for_a_rank_that_does_not_read(sends: str) -> None:
    async with ends() as (low, high):
        sender, receiver = (low, high) if sends == "low" else (high, low)
        number = 2 * MAX_UNREAD_BYTES // (8 * _SMALL)
        for seed in range(number):
            await sender.send(pattern(seed, _SMALL))
        for seed in range(number):
            received = await receiver.receive()
            assert received is not None
            assert torch.equal(received, pattern(seed, _SMALL))
