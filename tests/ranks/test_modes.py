"""Calls that run at once, or are cancelled, behave in the same way in each mode of the loop."""

import asyncio

import pytest
import torch

from aiotensor import ClosedError, PeerLostError
from aiotensor.ranks import RankPipe
from tests.cancellation.situations import SLOW
from tests.ranks.pipes import ends, in_every_mode
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = [pytest.mark.usefixtures("route"), in_every_mode]

_SOME = 5_000
_COUNTS = [10, None, _SOME, BIG, 0, SLOW, None, BIG]
_BIG_BYTES = BIG * 8


def _message(seed: int, count: int | None) -> torch.Tensor | None:
    return None if count is None else pattern(seed, count)


def _is(received: torch.Tensor | None, seed: int, count: int | None) -> bool:
    expected = _message(seed, count)
    if received is None or expected is None:
        return received is expected
    return torch.equal(received, expected)


async def _receive_all(pipe: RankPipe, first: int) -> None:
    for seed, count in enumerate(_COUNTS, first):
        assert _is(await pipe.receive(), seed, count)


async def _idle(*pipes: RankPipe) -> None:
    """Wait until all bytes have returned."""
    await until(lambda: not any(pipe.statistics().bytes_in_flight for pipe in pipes))


async def test_messages_in_both_directions_at_once_arrive_in_the_order_of_the_calls() -> None:
    async with ends() as (low, high):
        calls = [asyncio.ensure_future(_receive_all(high, 0)), asyncio.ensure_future(_receive_all(low, 100))]
        for index, count in enumerate(_COUNTS):
            calls += [
                asyncio.ensure_future(low.send(_message(index, count))),
                asyncio.ensure_future(high.send(_message(100 + index, count))),
            ]
        await asyncio.gather(*calls)
        await asyncio.gather(low.drain(), high.drain())
        assert (low.statistics().in_flight, high.statistics().in_flight) == (0, 0)
        assert low.statistics().messages_received == high.statistics().messages_received == len(_COUNTS)
        await _idle(low, high)


@pytest.mark.parametrize("count", [None, _SOME, BIG])
async def test_a_send_that_was_cancelled_while_it_waited_sends_nothing(count: int | None) -> None:
    async with ends(max_bytes=_BIG_BYTES) as (low, high):
        await low.send(pattern(0, BIG))
        cancelled = asyncio.ensure_future(low.send(_message(1, count)))
        later = asyncio.ensure_future(low.send(pattern(2, 10)))
        await until(lambda: low.statistics().waiting_sends == 2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert low.statistics().bytes_in_flight == _BIG_BYTES
        for seed, expected in ((0, BIG), (2, 10)):
            assert _is(await high.receive(), seed, expected)
        await later
        await low.drain()
        assert high.statistics().unclaimed == 0
        await _idle(low)


async def test_a_copy_that_was_cancelled_returns_its_bytes() -> None:
    async with ends() as (low, high):
        for _ in range(20):
            sending = [asyncio.ensure_future(low.send(pattern(seed, 2 * SLOW))) for seed in range(3)]
            await asyncio.sleep(0)  # all calls have begun
            sending[1].cancel()
            await asyncio.wait(sending)
            expected = [seed for seed, call in enumerate(sending) if not call.cancelled()]
            assert {0, 2} <= {*expected}
            for seed in expected:
                assert _is(await high.receive(), seed, 2 * SLOW)
        await _idle(low)


@pytest.mark.parametrize("copy", [False, True])
async def test_a_receive_that_was_cancelled_leaves_the_message_to_the_next(copy: bool) -> None:
    async with ends() as (low, high):
        for seed, count in enumerate(_COUNTS):
            cancelled, waiting = (asyncio.ensure_future(high.receive(copy=copy)) for _ in range(2))
            await until(lambda: high.statistics().waiting_receives == 2)
            sending = asyncio.ensure_future(low.send(_message(seed, count)))
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert _is(await waiting, seed, count)
            await sending


async def test_messages_of_send_nowait_arrive_before_later_waiting_sends() -> None:
    async with ends(max_bytes=4 * _BIG_BYTES) as (low, high):
        for seed, count in enumerate((10, BIG, None, _SOME)):
            low.send_nowait(_message(seed, count))
        waiting = asyncio.ensure_future(low.send(pattern(4, 4 * BIG)))
        draining = asyncio.ensure_future(low.drain())
        for seed, count in enumerate((10, BIG, None, _SOME, 4 * BIG)):
            assert not draining.done()
            assert _is(await high.receive(), seed, count)
        await waiting
        await draining


@pytest.mark.parametrize("closes", ["low", "high"])
async def test_a_pipe_that_closes_while_the_other_rank_sends_ends_all_calls(closes: str) -> None:
    async with ends(max_bytes=2 * _BIG_BYTES) as (low, high):
        closing, sender = (low, high) if closes == "low" else (high, low)

        async def send_all() -> None:
            for number in range(1000):
                await sender.send(_message(number, _COUNTS[number % 5]))

        sending = [asyncio.ensure_future(send_all()) for _ in range(3)]
        waiting = asyncio.ensure_future(sender.receive())
        assert await closing.receive() is not None
        await until(lambda: sender.statistics().waiting_sends > 0)
        own = asyncio.ensure_future(closing.receive())
        await closing.aclose()
        for call in (*sending, waiting, sender.drain()):
            with pytest.raises(PeerLostError):
                await call
        received = (await asyncio.gather(own, return_exceptions=True))[0]
        assert received is None or isinstance(received, torch.Tensor | ClosedError)
        assert (sender.statistics().in_flight, sender.statistics().bytes_in_flight) == (0, 0)
