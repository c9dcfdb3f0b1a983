"""Many messages in one iteration of the event loop, or before the other rank reads any of them."""

import asyncio
from contextlib import suppress

import pytest
import torch

from aiotensor import PeerLostError, WouldBlockError
from aiotensor.protocol.frames import MAX_FRAMES
from aiotensor.transports.base import MAX_DATA_BYTES, MAX_UNREAD_BYTES
from tests.ranks.pipes import ends
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("route")

_FEW, _SOME = 1_000, 5_000  # elements of int64: the bytes are in the frame, or between machines beside it

_LARGE = MAX_DATA_BYTES // 8 + 1  # in shared memory

_IN_FLIGHT = 4  # so many that later messages of one iteration share a record
_MANY = 500  # small messages: more than the kernel, or the other machine, accepts at once


# So many small messages leave space in the record for the tensor, but perhaps not for the answer, too.
@pytest.mark.parametrize("count", range(MAX_FRAMES - 3, MAX_FRAMES + 2))
async def test_a_tensor_arrives_after_small_messages_that_fill_a_record_with_an_answer(count: int) -> None:
    async with ends() as (low, high):
        for _ in range(_IN_FLIGHT):
            low.send_nowait(None)
        await high.send(None)
        await until(lambda: high.statistics().unclaimed == _IN_FLIGHT)
        assert await low.receive() is None  # the answer is written with the next record
        for _ in range(count):
            low.send_nowait(None)
        low.send_nowait(pattern(count, _SOME))
        for _ in range(_IN_FLIGHT + count):
            assert await high.receive() is None
        received = await high.receive()
        assert received is not None
        assert torch.equal(received, pattern(count, _SOME))


@pytest.mark.parametrize("count", [_FEW, _SOME])
@pytest.mark.parametrize("sends", ["low", "high"])
async def test_messages_within_max_bytes_wait_for_a_rank_that_does_not_read(sends: str, count: int) -> None:
    async with ends() as (low, high):
        sender, receiver = (low, high) if sends == "low" else (high, low)
        number = 2 * MAX_UNREAD_BYTES // (8 * count)
        for seed in range(number):
            sender.send_nowait(pattern(seed, count))
        for seed in range(number):
            received = await receiver.receive()
            assert received is not None
            assert torch.equal(received, pattern(seed, count))


@pytest.mark.parametrize("count", [_FEW, _SOME, _LARGE])
@pytest.mark.parametrize("closes_first", ["low", "high"])
async def test_messages_that_arrive_while_a_pipe_closes_do_not_disturb_it(
    closes_first: str, count: int
) -> None:
    async with ends(max_bytes=64 << 20) as (low, high):
        closing, other = (low, high) if closes_first == "low" else (high, low)
        for seed in range(_MANY):
            closing.send_nowait(pattern(seed, _FEW))
        ending = asyncio.ensure_future(closing.aclose())
        while not ending.done():
            if other.statistics().connected:
                with suppress(WouldBlockError):  # closing may take long if the encryption is slow
                    other.send_nowait(pattern(0, count))
            await asyncio.sleep(0)
        await ending
        for seed in range(_MANY):
            received = await other.receive()
            assert received is not None
            assert torch.equal(received, pattern(seed, _FEW))
        with pytest.raises(PeerLostError, match="it closed"):
            await other.receive()
        assert closing.statistics().peers_lost == 0
