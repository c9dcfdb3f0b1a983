"""The end of a pipe: closing, a lost peer, misuse, and objects that were forgotten."""

import asyncio
import os
import threading

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor import ClosedError, PeerLostError, UsageError
from aiotensor.ranks import RankPipe
from tests.ranks.pipes import Routes, ends, in_every_mode, opened
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = [pytest.mark.usefixtures("route"), in_every_mode]

_SOME = 5_000


async def test_messages_sent_before_a_clean_close_can_be_received() -> None:
    async with ends() as (low, high):
        for count in (10, _SOME, BIG, 3 * BIG):
            await low.send(pattern(count, count))
            low.send_nowait(pattern(count + 1, count))
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


async def test_waiting_calls_end_when_the_other_rank_closes() -> None:
    async with ends(max_bytes=BIG * 8) as (low, high):
        await low.send(pattern(0, BIG))
        calls = [
            asyncio.ensure_future(call)
            for call in (low.send(None), low.send(pattern(1, BIG)), low.receive(), low.drain())
        ]
        await until(lambda: low.statistics().waiting_sends == 2)
        await high.aclose()
        for call in calls:
            with pytest.raises(PeerLostError):
                await call
        with pytest.raises(PeerLostError):
            low.send_nowait(None)
        statistics = low.statistics()
        assert (statistics.connected, statistics.in_flight, statistics.bytes_in_flight) == (0, 0, 0)
        assert statistics.peers_lost == 1


async def test_waiting_calls_end_when_their_pipe_is_closed() -> None:
    async with ends(max_bytes=BIG * 8) as (low, _):
        await low.send(pattern(0, BIG))
        calls = [
            asyncio.ensure_future(call)
            for call in (low.send(None), low.send(pattern(1, BIG)), low.receive(), low.drain())
        ]
        await until(lambda: low.statistics().waiting_sends == 2)
        await low.aclose()
        for call in calls:
            with pytest.raises(ClosedError, match="RankPipe was closed"):
                await call
        await low.aclose()  # has no effect
        with pytest.raises(ClosedError, match="create a new one"):
            await low.send(None)
        with pytest.raises(ClosedError, match="create a new one"):
            await low.__aenter__()


async def test_both_ends_may_close_at_once() -> None:
    for _ in range(10):
        async with ends() as (low, high):
            await low.send(pattern(0, BIG))
            await high.send(pattern(1, _SOME))
            await asyncio.gather(low.aclose(), high.aclose())


async def test_copies_under_way_end_when_the_pipe_is_closed() -> None:
    async with ends() as (low, high):
        sending = [asyncio.ensure_future(low.send(pattern(0, 10 * BIG))) for _ in range(4)]
        await asyncio.sleep(0)
        await low.aclose()
        for call in await asyncio.gather(*sending, return_exceptions=True):
            assert call is None or isinstance(call, ClosedError)
        with pytest.raises(PeerLostError):
            while True:
                assert torch.equal(await high.receive() or pattern(0, 1), pattern(0, 10 * BIG))


async def test_statistics_are_available_before_opening_and_after_closing() -> None:
    pipe = RankPipe(HashStore(), 1, rank=0, world_size=2, max_bytes=1 << 20)
    assert pipe.statistics().max_bytes == 1 << 20
    async with ends() as (low, high):
        await low.send(torch.ones(4))
        await high.receive()
    assert (low.statistics().messages_sent, low.statistics().bytes_sent) == (1, 16)
    assert (high.statistics().messages_received, high.statistics().bytes_received) == (1, 16)
    assert high.statistics().connected == 0


async def test_a_pipe_can_be_used_only_where_it_was_opened() -> None:
    pipe = RankPipe(HashStore(), 1, rank=0, world_size=2)
    with pytest.raises(UsageError, match="is not open yet"):
        await pipe.send(None)
    async with ends() as (low, _):
        with pytest.raises(UsageError, match="is already open"):
            await low.__aenter__()
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                low.send_nowait(None)
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "belongs to another thread" in str(errors[0])
        child = os.fork()
        if child == 0:
            try:
                low.statistics()
            except UsageError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7  # noqa: ASYNC222 - it exits at once
        await low.send(None)


async def test_a_garbage_collected_pipe_warns_and_disconnects_its_peer() -> None:
    store = HashStore()
    low, high = (
        RankPipe(store, 1 - rank, rank=rank, world_size=2, **Routes.current.options) for rank in (0, 1)
    )
    await opened(low, high)
    forgotten = [low]
    del low
    with pytest.warns(ResourceWarning, match="unclosed <RankPipe open, rank 0 to 1>"):
        forgotten.clear()
    with pytest.raises(PeerLostError):
        await high.receive()
    await high.aclose()


async def test_cancelling_aclose_closes_at_once() -> None:
    async with ends() as (low, high):
        await low.send(pattern(0, BIG))
        closing = asyncio.ensure_future(low.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        with pytest.raises(PeerLostError):
            while True:
                await high.receive()
