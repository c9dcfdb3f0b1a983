"""Cancelling any await of a pipe has only the effects that the docstrings describe, and leaks nothing."""

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor import ClosedError, PeerLostError
from aiotensor.ranks import RankPipe
from tests.cancellation.situations import SLOW
from tests.cancelling import Attempt, Running, cancel_everywhere
from tests.ranks.pipes import ROUTES, Routes, ends, opened
from tests.selection import COMPLETE
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = [
    pytest.mark.usefixtures("route"),
    pytest.mark.parametrize("route", list(ROUTES) if COMPLETE else ["unix"], indirect=True),
]

_SOME = 5_000
_COUNTS = [3, _SOME, BIG, SLOW] if COMPLETE else [3, SLOW]


def _idle(
    attempt: Callable[[Attempt], Awaitable[None]], *pipes: RankPipe
) -> Callable[[Attempt], Awaitable[None]]:
    """Wait after each run until all bytes have returned: a thread may still copy."""

    async def run(one: Attempt) -> None:
        await attempt(one)
        gc.collect()  # the task refers to its result
        await until(lambda: not any(pipe.statistics().bytes_in_use for pipe in pipes))

    return run


async def _check_sent(sending: Running[None], high: RankPipe, seed: int, count: int | None) -> None:
    """See that a message was sent, or was not, and that the next one arrives after it."""
    if await sending.completed():
        received = await high.receive()
        assert (received is None) == (count is None)
        assert received is None or torch.equal(received, pattern(seed, received.numel()))
        assert received is None or received.numel() == count
    assert not high.statistics().unclaimed


@pytest.mark.parametrize("count", [None, *_COUNTS])
async def test_a_cancelled_send_is_sent_or_returns_its_bytes(count: int | None) -> None:
    async with ends() as (low, high):

        async def attempt(attempt: Attempt) -> None:
            message = None if count is None else pattern(1, count)
            sending = attempt.start(low.send(message))
            await _check_sent(sending, high, 1, count)
            await low.send(None)
            assert await high.receive() is None

        await cancel_everywhere(_idle(attempt, low, high), low, high)


@pytest.mark.parametrize("count", _COUNTS)
async def test_a_send_that_waits_for_bytes_may_be_cancelled(count: int) -> None:
    filling = 2 * SLOW  # elements of int64
    async with ends(max_bytes=filling * 8) as (low, high):

        async def attempt(attempt: Attempt) -> None:
            await low.send(pattern(0, filling))
            await until(lambda: high.statistics().unclaimed == 1)
            sending = attempt.start(low.send(pattern(1, count)))
            await sending.until(lambda: low.statistics().waiting)
            received = await high.receive()
            assert received is not None
            del received
            await _check_sent(sending, high, 1, count)

        assert await cancel_everywhere(_idle(attempt, low, high), low, high)


async def test_a_cancelled_send_does_not_delay_those_behind_it() -> None:
    async with ends() as (low, high):

        async def attempt(attempt: Attempt) -> None:
            sending = attempt.start(low.send(pattern(1, SLOW)))
            await sending.until(lambda: sending.suspensions)
            behind = asyncio.ensure_future(low.send(pattern(2, BIG)))
            received = await high.receive()
            assert received is not None
            if await sending.completed():
                assert torch.equal(received, pattern(1, SLOW))
                received = await high.receive()
            assert received is not None
            assert torch.equal(received, pattern(2, BIG))
            await behind

        assert await cancel_everywhere(_idle(attempt, low, high), low, high)


@pytest.mark.parametrize(
    ("count", "copy"), [(None, False), *((count, copy) for count in _COUNTS for copy in (False, True))]
)
async def test_a_cancelled_receive_loses_no_message(count: int | None, copy: bool) -> None:
    async with ends() as (low, high):

        async def attempt(attempt: Attempt) -> None:
            receiving = attempt.start(high.receive(copy=copy))
            message = None if count is None else pattern(1, count)
            sends: list[asyncio.Task[None]] = []
            await receiving.bring(lambda: sends.append(asyncio.create_task(low.send(message))))
            await asyncio.gather(*sends)
            await low.send(pattern(2, 3))
            received = receiving.value if await receiving.completed() else await high.receive()
            assert (received is None) == (count is None)
            assert received is None or torch.equal(received, pattern(1, received.numel()))
            following = await high.receive()
            assert following is not None
            assert torch.equal(following, pattern(2, 3))

        assert await cancel_everywhere(_idle(attempt, low, high), low, high)


async def test_a_cancelled_drain_has_no_effect() -> None:
    async with ends() as (low, high):

        async def attempt(attempt: Attempt) -> None:
            await low.send(None)
            draining = attempt.start(low.drain())
            await draining.until(lambda: draining.suspensions)
            assert await high.receive() is None
            await draining.completed()
            await low.drain()

        assert await cancel_everywhere(_idle(attempt, low, high), low, high)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_cancelled_opening_leaves_nothing_and_the_next_pipe_meets(rank: int) -> None:
    store = HashStore()

    def end(rank: int) -> RankPipe:
        return RankPipe(store, 1 - rank, rank=rank, world_size=2, **Routes.current.options)

    async def attempt(attempt: Attempt) -> None:
        pipes = [end(0), end(1)]
        other = asyncio.ensure_future(pipes[1 - rank].__aenter__())
        opening = attempt.start(pipes[rank].__aenter__())
        if not await opening.completed():
            pipes[rank] = end(rank)
            joining = asyncio.ensure_future(pipes[rank].__aenter__())
            await until(
                lambda: joining.done() or (other.done() and not pipes[1 - rank].statistics().connected)
            )
            if not joining.done():  # the other end has met the cancelled one, and has lost it
                with pytest.raises(PeerLostError):
                    await pipes[1 - rank].receive()
                await pipes[1 - rank].aclose()
                pipes[1 - rank] = end(1 - rank)
                other = asyncio.ensure_future(pipes[1 - rank].__aenter__())
            await joining
        await other
        await pipes[0].send(pattern(0, _SOME))
        received = await pipes[1].receive()
        assert received is not None
        assert torch.equal(received, pattern(0, _SOME))
        for pipe in pipes:
            await pipe.aclose()

    assert await cancel_everywhere(attempt)


@pytest.mark.parametrize("count", [3, SLOW])
async def test_a_cancelled_aclose_closes_nevertheless(count: int) -> None:
    store = HashStore()

    async def attempt(attempt: Attempt) -> None:
        low, high = (
            RankPipe(store, 1 - rank, rank=rank, world_size=2, **Routes.current.options) for rank in (0, 1)
        )
        await opened(low, high)
        await high.send(pattern(1, count))
        await low.send(pattern(0, count))
        waiting = asyncio.ensure_future(low.receive())
        closing = attempt.start(low.aclose())
        await closing.completed()
        with pytest.raises(ClosedError):
            await low.send(None)
        [received] = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(received, torch.Tensor | ClosedError)
        del received, waiting
        with pytest.raises(PeerLostError):
            while True:
                await high.receive()
        await high.aclose()

    await cancel_everywhere(attempt)
