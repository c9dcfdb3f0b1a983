"""A receiver that does not read: senders wait, no queue grows, no call hangs, and no tensor is lost."""

import asyncio
import os

import pytest

from aiotensor import (
    ClosedError,
    DiscardedError,
    PeerLostError,
    TensorReceiver,
    TensorSender,
    WouldBlockError,
)
from tests.conformance.makers import Clogged, PairMaker, stopped
from verification.patterns import BIG, pattern
from verification.processes import peers, watch
from verification.processes.allocator import forget_free_memory
from verification.promptly import promptly
from verification.waiting import settled, until

_IMPATIENT = 2000  # callers, of 8 KB each: what piles up would be 16 MB
_GROWTH_KIB = 1024


async def _takes_all(clogged: Clogged) -> None:
    """Continue the engine, and check that every sent tensor arrives."""
    clogged.engine.go_on()
    for seed, handle in enumerate(clogged.handles):
        assert await clogged.engine.call(peers.receive_pattern, handle, seed)


@pytest.mark.promise(14)
async def test_send_waits_for_a_receiver_that_does_not_read_and_other_calls_raise(pairs: PairMaker) -> None:
    async with pairs.clogged(max_concurrent_videos=1000, arena_bytes=2 * BIG * 8) as clogged:
        sender, engine, handles = clogged
        assert 1 < len(handles) < 1000
        for tensor, nbytes in ((pattern(0, 3), 0), (pattern(0, BIG), BIG * 8)):
            with pytest.raises(WouldBlockError, match="slow to read") as caught:
                sender.send_nowait(tensor)
            messages, memory = caught.value.messages, caught.value.bytes
            assert (messages.limit, messages.in_use, messages.requested) == (1000, len(handles), 1)
            assert (memory.limit, memory.in_use, memory.requested) == (2 * BIG * 8, 0, nbytes)
            with pytest.raises(WouldBlockError, match="slow to read"):
                sender.post(tensor)
        seen = sender.statistics()
        assert (seen.in_flight, seen.bytes_in_use) == (len(handles), 0)
        sending = [
            asyncio.create_task(sender.send(pattern(seed, count))) for seed, count in ((1, 3), (2, BIG))
        ]
        draining = [asyncio.create_task(sender.drain()) for _ in range(2)]
        await asyncio.sleep(0.05)  # the loop turns and keeps its timers
        assert not any(call.done() for call in (*sending, *draining))
        draining[0].cancel()
        await asyncio.wait(draining[:1])
        assert draining[0].cancelled()
        await _takes_all(clogged)
        for seed, send in zip((1, 2), sending, strict=True):
            assert await engine.call(peers.receive_pattern, await send, seed)
        await draining[1]
        await settled(sender)
        assert sender.statistics().messages_sent == len(handles) + 3  # one before it was clogged


@pytest.mark.promise(5)
async def test_abandoned_sends_to_a_receiver_that_does_not_read_leak_no_memory(pairs: PairMaker) -> None:
    async with pairs.clogged() as (sender, _, handles):
        await _give_up(sender, _IMPATIENT // 10)
        forget_free_memory()
        before = watch.resident_kib(os.getpid())
        await _give_up(sender, _IMPATIENT)
        forget_free_memory()
        assert watch.resident_kib(os.getpid()) - before < _GROWTH_KIB
        assert sender.statistics().in_flight == len(handles)


async def _give_up(sender: TensorSender, count: int) -> None:
    for seed in range(count):
        sending = asyncio.create_task(sender.send(pattern(seed, 1000)))
        await asyncio.sleep(0)
        assert not sending.done()
        sending.cancel()
        await asyncio.wait([sending])


async def test_a_send_that_waits_for_the_link_ends_at_once_when_its_message_is_discarded(
    pairs: PairMaker,
) -> None:
    async with pairs.near_sender(max_concurrent_videos=1000) as (sender, engine):
        with pytest.raises(DiscardedError):
            async with sender.message() as message:
                handle = await message.send(pattern(0, 3))
                async with stopped(sender, engine) as handles:
                    waiting = [
                        asyncio.create_task(message.send(pattern(1, 3))),
                        asyncio.create_task(message.send(pattern(1, BIG))),
                    ]
                    await asyncio.sleep(0)
                    assert not any(wait.done() for wait in waiting)
                    sender.discard(handle)
                    for wait in waiting:
                        with pytest.raises(DiscardedError):
                            await wait
                    assert sender.statistics().in_flight == len(handles)
                    assert sender.statistics().bytes_in_use == 0


async def test_closing_waits_for_a_receiver_that_does_not_read_and_loses_nothing(pairs: PairMaker) -> None:
    async with pairs.clogged() as clogged:
        sending = asyncio.create_task(clogged.sender.send(pattern(0, 3)))
        await until(lambda: clogged.sender.statistics().in_flight == len(clogged.handles) + 1)
        closing = asyncio.create_task(clogged.sender.aclose())
        with pytest.raises(ClosedError):
            await sending
        assert not closing.done()
        await _takes_all(clogged)
        await closing


@pytest.mark.promise(10)
async def test_a_receiver_killed_while_it_does_not_read_ends_every_wait_within_a_second(
    pairs: PairMaker,
) -> None:
    async with pairs.clogged() as (sender, engine, handles):
        waits: list[asyncio.Task[object]] = [
            asyncio.create_task(sender.send(pattern(0, 3))),
            asyncio.create_task(sender.send(pattern(0, BIG))),
            asyncio.create_task(sender.drain()),
        ]
        await until(lambda: sender.statistics().in_flight == len(handles) + 2)
        with promptly():
            engine.kill()
            for wait in waits:
                with pytest.raises(PeerLostError) as caught:
                    await wait
                assert caught.value.pid == engine.pid
        await settled(sender)


async def test_senders_do_not_reconnect_to_a_receiver_that_is_closing(
    pairs: PairMaker, caplog: pytest.LogCaptureFixture
) -> None:
    answers = 900  # more than the way back holds
    async with (
        peers.peers(pairs.endpoint, 1) as [api],
        TensorReceiver(pairs.endpoint) as receiver,
    ):
        await api.call(peers.open_sender, answers)
        assert await api.call(_send_small, answers) == answers
        await until(lambda: receiver.statistics().unclaimed_tensors == answers)
        await api.stop()
        try:
            async with TensorSender(pairs.endpoint) as sender:
                await receiver.receive(await sender.send(pattern(0, BIG)))
                for _ in range(answers):
                    await anext(receiver)
                    await asyncio.sleep(0)  # a separate answer
                closing = asyncio.create_task(receiver.aclose())
                await until(lambda: sender.statistics().receivers_lost == 1)
                await asyncio.sleep(0.05)  # by then it has looked for another one several times
                assert sender.statistics().receivers_lost == 1
                assert not closing.done()
        finally:
            api.go_on()
        await closing
        assert receiver.statistics().senders_lost == 0
        assert "protocol" not in caplog.text


async def _send_small(state: peers.State, count: int) -> int:
    for seed in range(count):
        await state.sender.send(pattern(seed, 100))
    return count
