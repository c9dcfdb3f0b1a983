"""The end of a pipe: closing, a lost peer, misuse, and objects that were forgotten."""

import asyncio
from contextlib import suppress

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor import ClosedError, PeerLostError, UsageError
from aiotensor.memory.tensors import MAX_INLINE_BYTES
from aiotensor.ranks import RankPipe
from tests.ranks.pipes import ends, in_every_mode
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("route")

_FEW, _SOME = 1_000, 5_000  # elements of int64: the bytes are in the frame, or between machines beside it
_LARGE = MAX_INLINE_BYTES // 8 + 1  # in shared memory
_MANY = 500  # small messages: more than the kernel, or the other machine, accepts at once


@in_every_mode
async def test_messages_sent_before_a_clean_close_can_be_received() -> None:
    async with ends() as (low, high):
        for count in (10, _SOME, BIG, 3 * BIG):
            await low.send(pattern(count, count))
            await low.send(pattern(count + 1, count))
        await low.aclose()
        for count in (10, _SOME, BIG, 3 * BIG):
            for seed in (count, count + 1):
                received = await high.receive()
                assert received is not None
                assert torch.equal(received, pattern(seed, count))
        await high.drain()
        for call in (high.receive(), high.send(None)):
            with pytest.raises(PeerLostError, match=r"rank 0 \(pid \d+\) was lost: it closed"):
                await call


async def test_waiting_calls_end_when_their_pipe_is_closed() -> None:
    async with ends(max_bytes=BIG * 8) as (low, _):
        await low.send(pattern(0, BIG))
        calls = [
            asyncio.ensure_future(call)
            for call in (low.send(None), low.send(pattern(1, BIG)), low.receive(), low.drain())
        ]
        await until(lambda: low.statistics().waiting == 2)
        await low.aclose()
        for call in calls:
            with pytest.raises(ClosedError, match="RankPipe was closed"):
                await call
        await low.aclose()  # has no effect
        with pytest.raises(ClosedError, match="create a new one"):
            await low.send(None)
        with pytest.raises(ClosedError, match="create a new one"):
            await low.__aenter__()


async def test_a_pipe_is_opened_once_before_it_is_used() -> None:
    pipe = RankPipe(HashStore(), 1, rank=0, world_size=2)
    with pytest.raises(UsageError, match="is not open yet"):
        await pipe.send(None)
    async with ends() as (low, _):
        with pytest.raises(UsageError, match="is already open"):
            await low.__aenter__()
        await low.send(None)


@pytest.mark.parametrize(("closes_first", "count"), [("low", _SOME), ("high", _LARGE)])
async def test_messages_that_arrive_while_a_pipe_closes_do_not_disturb_it(
    closes_first: str, count: int
) -> None:
    async with ends(max_bytes=64 << 20) as (low, high):
        closing, other = (low, high) if closes_first == "low" else (high, low)
        for seed in range(_MANY):
            await closing.send(pattern(seed, _FEW))
        ending = asyncio.ensure_future(closing.aclose())
        while not ending.done():
            if other.statistics().connected:
                with suppress(PeerLostError):
                    await other.send(pattern(0, count))
            await asyncio.sleep(0)
        await ending
        for seed in range(_MANY):
            received = await other.receive()
            assert received is not None
            assert torch.equal(received, pattern(seed, _FEW))
        with pytest.raises(PeerLostError, match="it closed"):
            await other.receive()
        assert closing.statistics().peers_lost == 0


@in_every_mode
@pytest.mark.parametrize("closes", ["low", "high"])
async def test_a_pipe_that_closes_while_the_other_rank_sends_ends_all_calls(closes: str) -> None:
    async with ends(max_bytes=2 * BIG * 8) as (low, high):
        closing, sender = (low, high) if closes == "low" else (high, low)

        async def send_all() -> None:
            for number in range(1000):
                await sender.send([pattern(number, 10), None, pattern(number, BIG)][number % 3])

        sending = [asyncio.ensure_future(send_all()) for _ in range(3)]
        waiting = asyncio.ensure_future(sender.receive())
        assert await closing.receive() is not None
        await until(lambda: sender.statistics().waiting > 0)
        own = asyncio.ensure_future(closing.receive())
        await closing.aclose()
        for call in (*sending, waiting, sender.drain()):
            with pytest.raises(PeerLostError):
                await call
        received = (await asyncio.gather(own, return_exceptions=True))[0]
        assert received is None or isinstance(received, torch.Tensor | ClosedError)
        assert sender.statistics().in_flight == 0
        await until(lambda: sender.statistics().bytes_in_use == 0)  # a thread may still copy
