"""Bytes in flight are bounded, and return whatever happens to a message."""

import asyncio
import gc
import logging

import pytest
import torch

from aiotensor import ClosedError, PeerLostError, WouldBlockError
from aiotensor.ranks import RankPipe, pipe
from aiotensor.ranks.pipe import LEAST_MESSAGE_BYTES
from tests.ranks.pipes import ends, in_every_mode
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("route")

once = pytest.mark.parametrize("route", ["unix"], indirect=True)  # the route makes no difference

_BIG_BYTES = BIG * 8
_SOME = 5_000  # elements of int64: between machines, they move in one step


async def _idle(*pipes: RankPipe) -> None:
    """Wait until all bytes have returned."""
    gc.collect()
    await until(lambda: all(pipe.statistics().bytes_in_use == 0 for pipe in pipes))
    assert all(pipe.statistics().in_flight == 0 for pipe in pipes)


@pytest.mark.promise(14)
@in_every_mode
@pytest.mark.parametrize("count", [10, BIG])
async def test_bytes_in_flight_never_exceed_the_limit(count: int) -> None:
    cost = max(count * 8, LEAST_MESSAGE_BYTES)
    async with ends(max_bytes=3 * cost) as (low, high):
        sending = [asyncio.ensure_future(low.send(pattern(seed, count))) for seed in range(8)]
        await until(lambda: high.statistics().unclaimed == 3)
        await asyncio.sleep(0.02)
        statistics = low.statistics()
        assert (statistics.bytes_in_use, statistics.waiting) == (3 * cost, 5)
        assert [task.done() for task in sending] == [True] * 3 + [False] * 5
        for seed in range(8):
            received = await high.receive()
            assert received is not None
            assert torch.equal(received, pattern(seed, count))
            del received
        await asyncio.gather(*sending)
        assert low.statistics().peak_bytes_in_use == 3 * cost
        await _idle(low)


async def test_a_received_tensor_counts_until_it_is_freed() -> None:
    async with ends(max_bytes=2 * _BIG_BYTES) as (low, high):
        for seed in range(2):
            await low.send(pattern(seed, 2 * BIG))
            copy = await high.receive(copy=True)  # frees the bytes at once
            assert copy is not None
            assert torch.equal(copy, pattern(seed, 2 * BIG))
        await low.send(pattern(0, 2 * BIG))
        received = await high.receive()
        await low.drain()
        waiting = asyncio.ensure_future(low.send(pattern(1, BIG)))
        await until(lambda: low.statistics().waiting == 1)
        del received
        await waiting


@pytest.mark.promise(15)
async def test_waiting_calls_are_served_in_their_order() -> None:
    async with ends(max_bytes=2 * _BIG_BYTES) as (low, high):
        await low.send(pattern(0, BIG))
        large = asyncio.ensure_future(low.send(pattern(1, 2 * BIG)))
        await until(lambda: low.statistics().waiting == 1)
        small = asyncio.ensure_future(low.send(pattern(2, 10)))
        await until(lambda: low.statistics().waiting == 2)
        for seed, count in enumerate((BIG, 2 * BIG, 10)):
            received = await high.receive()
            assert received is not None
            assert torch.equal(received, pattern(seed, count))
            del received
        await asyncio.gather(large, small)


@once
async def test_a_wait_for_bytes_ends_after_max_wait_s() -> None:
    async with ends(max_bytes=_BIG_BYTES, max_wait_s=1) as (low, high):  # which limits opening, too
        await low.send(pattern(0, BIG))
        receiving = asyncio.ensure_future(low.receive())  # waits at the same time
        with pytest.raises(WouldBlockError, match="not enough bytes were free"):
            await low.send(None)
        with pytest.raises(WouldBlockError, match="no message has arrived within"):
            await receiving
        assert await high.receive() is not None
        await low.send(None)
        assert await high.receive() is None


@once
async def test_a_long_wait_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipe, "_LONG_WAIT_S", 0.01)
    async with ends(max_bytes=_BIG_BYTES) as (low, high):
        await low.send(pattern(0, BIG))
        with caplog.at_level(logging.WARNING, "aiotensor.ranks"):
            waiting = asyncio.ensure_future(low.send(pattern(1, 10)))
            await until(lambda: any(record.event == "slow_peer" for record in caplog.records))  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
            assert len(caplog.records) == 1
            [record] = caplog.records
            assert "pipe of rank 0 to rank 1" in record.getMessage()
        assert await high.receive() is not None
        await waiting


@once
async def test_a_small_message_that_cannot_be_read_uses_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object) -> bytes:
        raise OSError("no memory is left")

    async with ends() as (low, high):
        with monkeypatch.context() as patch:
            patch.setattr(pipe, "bytes_of", fail)
            with pytest.raises(OSError, match="no memory is left"):
                await low.send(pattern(0, 3))
        assert low.statistics().bytes_in_use == 0
        await low.send(pattern(1, 3))
        received = await high.receive()
        assert received is not None
        assert torch.equal(received, pattern(1, 3))


@once
async def test_drain_waits_for_earlier_messages_only() -> None:
    async with ends(max_bytes=4 * _BIG_BYTES) as (low, high):
        await low.drain()
        await low.send(None)
        draining = asyncio.ensure_future(low.drain())
        await asyncio.sleep(0)
        await low.send(pattern(0, BIG))
        assert await high.receive() is None
        await draining
        later = asyncio.ensure_future(low.drain())
        await asyncio.sleep(0.02)
        assert not later.done()
        await high.aclose()
        with pytest.raises(PeerLostError):
            await later
        await low.aclose()
        with pytest.raises(ClosedError):
            await low.drain()
