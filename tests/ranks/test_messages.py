"""Messages arrive in order, complete, with their values, in both directions."""

import asyncio
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from aiotensor import TooLargeError, UnsupportedTensorError
from aiotensor.transports.base import MAX_DATA_BYTES
from tests.ranks.pipes import Route, ends, in_every_mode
from tests.selection import DTYPES
from tests.test_values import VIEWS, random_bits, same_bits
from verification.patterns import BIG, pattern

pytestmark = [
    pytest.mark.usefixtures("route"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

# Elements of int64, one size for each way: in a frame, with a frame (between machines), and in a segment.
_FEW, _SOME, _MANY = 100, 5_000, MAX_DATA_BYTES // 8 + 1
_COUNTS = [0, 1, _FEW, _SOME, BIG, MAX_DATA_BYTES // 8, _MANY]


@in_every_mode
@pytest.mark.parametrize("count", _COUNTS)
async def test_a_tensor_arrives_in_both_directions(count: int) -> None:
    async with ends() as (low, high):
        for sender, receiver in ((low, high), (high, low)):
            await sender.send(pattern(count, count))
            received = await receiver.receive()
            assert received is not None
            assert torch.equal(received, pattern(count, count))


@in_every_mode
async def test_none_is_a_message() -> None:
    async with ends() as (low, high):
        for message in (None, torch.ones(2), None, None):
            await low.send(message)
        assert await high.receive() is None
        assert await high.receive() is not None
        assert await high.receive() is None
        assert await high.receive() is None


@pytest.mark.parametrize("name", DTYPES)
async def test_every_dtype_arrives_bit_for_bit(name: str) -> None:
    async with ends() as (low, high):
        for shape in ((3, 4), (300, 70), (0, 3), ()):
            source = random_bits(DTYPES[name], shape)
            await low.send(source)
            received = await high.receive()
            assert type(received) is torch.Tensor
            assert same_bits(received, source)


@pytest.mark.parametrize("name", VIEWS)
async def test_every_layout_arrives_with_its_values(name: str) -> None:
    async with ends() as (low, high):
        for shape in ((12, 6), (300, 600), (1200, 600)):
            source = VIEWS[name](torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape))
            before = source.clone()
            await low.send(source)
            received = await high.receive()
            assert received is not None
            assert torch.equal(received, source)
            assert torch.equal(source, before)


@pytest.mark.parametrize("count", [_FEW, _SOME, _MANY])
async def test_gradients_and_parameters_arrive_as_such(count: int) -> None:
    async with ends() as (low, high):
        await low.send(torch.ones(count, requires_grad=True))
        await low.send(Parameter(torch.ones(count), requires_grad=False))
        first, second = await high.receive(), await high.receive()
        assert first is not None
        assert first.requires_grad
        assert isinstance(second, Parameter)
        assert not second.requires_grad


@settings(max_examples=15)
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


@in_every_mode
async def test_a_small_message_waits_for_a_larger_one_before_it() -> None:
    async with ends() as (low, high):
        sending = asyncio.ensure_future(low.send(pattern(0, 4 * BIG)))
        await asyncio.sleep(0)  # the first call has begun
        low.send_nowait(None)
        low.send_nowait(pattern(1, _SOME))
        for seed, count in ((0, 4 * BIG), (None, 0), (1, _SOME)):
            received = await high.receive()
            assert (received is None) == (seed is None)
            assert received is None or torch.equal(received, pattern(seed or 0, count))
        await sending


@in_every_mode
@pytest.mark.parametrize("count", [_FEW, _SOME, BIG, _MANY])
async def test_the_source_may_change_as_soon_as_send_has_returned(count: int) -> None:
    async with ends() as (low, high):
        for seed in (3, 4):  # the first in fresh memory, the second in warm
            source = pattern(seed, count)
            await low.send(source)
            source.fill_(-1)
            other = pattern(seed + 10, count)
            low.send_nowait(other)
            other.fill_(-1)
            for expected in (seed, seed + 10):
                received = await high.receive()
                assert received is not None
                assert torch.equal(received, pattern(expected, count))


@in_every_mode
async def test_the_source_may_change_after_a_send_behind_a_larger_message() -> None:
    async with ends() as (low, high):
        sending = asyncio.ensure_future(low.send(pattern(0, 10 * BIG)))
        await asyncio.sleep(0)
        sources = [pattern(count, count) for count in (_FEW, _SOME, BIG)]
        for source in sources:
            await low.send(source)
            source.fill_(-1)
        await sending
        received = await high.receive()
        for count in (_FEW, _SOME, BIG):
            received = await high.receive()
            assert received is not None
            assert torch.equal(received, pattern(count, count))


async def test_a_received_tensor_outlives_the_pipe_and_its_neighbours() -> None:
    async with ends(max_bytes=8 * BIG * 8) as (low, high):
        kept = []
        for seed in range(20):
            await low.send(pattern(seed, BIG))
            tensor = await high.receive()
            if seed % 10 == 3:
                kept.append((seed, tensor))
            del tensor
    gc.collect()
    for seed, tensor in kept:
        assert tensor is not None
        assert torch.equal(tensor, pattern(seed, BIG))


@in_every_mode
async def test_a_tensor_that_cannot_be_sent_acquires_no_resources() -> None:
    async with ends(max_bytes=1 << 20) as (low, high):
        for wrong in (torch.ones(3).to_sparse(), torch.empty(3, device="meta")):
            with pytest.raises(UnsupportedTensorError):
                await low.send(wrong)
            with pytest.raises(UnsupportedTensorError):
                low.send_nowait(wrong)
        for call in (low.send, low.send_nowait):
            with pytest.raises(TooLargeError) as caught:
                done = call(torch.empty((1 << 20) + 1, dtype=torch.uint8))
                if done is not None:
                    await done
            assert (caught.value.limit, caught.value.requested) == (1 << 20, (1 << 20) + 1)
        statistics = low.statistics()
        assert (statistics.in_flight, statistics.bytes_in_flight) == (0, 0)
        assert statistics.errors == {"UnsupportedTensorError": 4, "TooLargeError": 2}
        await low.send(torch.empty(1 << 20, dtype=torch.uint8))  # as large as possible
        assert await high.receive() is not None


async def test_several_pipes_of_one_pair_are_independent(route: Route) -> None:
    async with ends() as first, ends() as second:
        await first.low.send(pattern(1, _SOME))
        await second.low.send(pattern(2, _SOME))
        received = await second.high.receive()
        assert received is not None
        assert torch.equal(received, pattern(2, _SOME))
        received = await first.high.receive()
        assert received is not None
        assert torch.equal(received, pattern(1, _SOME))
