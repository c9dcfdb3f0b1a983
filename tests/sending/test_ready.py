"""`ready` returns once a receiver has admitted the sender, and no earlier."""

import asyncio

import pytest

from aiotensor import ClosedError, RefusedError, TensorReceiver, TensorSender, TooLargeError, WouldBlockError
from aiotensor.protocol.frames import MAX_RECORD_BYTES, Close
from tests.bare_peers import BareReceiver
from tests.frames import receiver_hello
from tests.pairs import endpoint, pair
from verification.fuzz.listening import waiting_at
from verification.internals import pause_reading, resume_reading, senders_of, session_of
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02


@pytest.mark.usefixtures("link")
async def test_ready_returns_once_a_receiver_has_admitted_the_sender() -> None:
    with endpoint() as place:
        async with TensorSender(place) as sender:
            probe = asyncio.create_task(sender.ready())
            async with TensorReceiver(place) as receiver:
                await probe
                assert receiver.statistics().senders == 1
                assert sender.receiver_id == receiver.id
                await sender.ready()
                await receiver.receive(await sender.send(pattern(0, 3)))
                await sender.ready()


async def test_ready_waits_for_the_admission_after_the_hello_of_the_receiver() -> None:
    with endpoint("unix") as place, waiting_at(str(place)) as listener:
        async with TensorSender(place) as sender:
            probe = asyncio.create_task(sender.ready())
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            with sock:
                sock.setblocking(False)
                await BareReceiver(sock).say(receiver_hello(is_admitted=False))
                await until(lambda: session_of(sender).pid == 7)
                assert not probe.done()
                await BareReceiver(sock).say(Close("max_senders=0", is_refusal=True))
                with pytest.raises(
                    RefusedError, match=r"the receiver \(pid 7\) refused .*max_senders=0"
                ) as no:
                    await probe
                assert no.value.pid == 7
            assert sender.statistics().errors == {"RefusedError": 1}


async def test_ready_waits_for_the_next_receiver_when_one_closes_or_is_lost(address: str) -> None:
    async with TensorSender(address) as sender:
        async with TensorReceiver(address):
            await sender.ready()
        await until(lambda: sender.receiver_id is None)
        probe = asyncio.create_task(sender.ready())
        with waiting_at(address) as listener:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.close()
        async with TensorReceiver(address):
            await probe


async def test_ready_times_out_after_max_wait_s_and_states_the_cause(address: str) -> None:
    async with TensorSender(address, max_wait_s=SHORT_S) as sender:
        with pytest.raises(WouldBlockError, match=rf"no receiver was connected at {address} for 0\.02 s"):
            await sender.ready()
        with waiting_at(address) as listener:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            with sock:
                sock.setblocking(False)
                assert await asyncio.get_running_loop().sock_recv(sock, MAX_RECORD_BYTES)
                with pytest.raises(
                    WouldBlockError, match=rf"the receiver at {address} has not answered for 0\.02 s"
                ):
                    await sender.ready()
        assert sender.statistics().errors == {"UnavailableError": 2}


async def test_closing_and_cancelling_end_ready(address: str) -> None:
    async with TensorSender(address) as unconnected:
        waiting = asyncio.create_task(unconnected.ready())
        await asyncio.sleep(0)
        await unconnected.aclose()
        with pytest.raises(ClosedError):
            await waiting
    async with TensorSender(address, 1) as sender:
        first, second = (asyncio.create_task(sender.ready()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        async with TensorReceiver(address):
            await second
            await sender.send(pattern(0, 3))
            for_permit = asyncio.create_task(sender.ready(nbytes=0))
            assert await _still_waits(for_permit)
            await sender.aclose()
            for closed in (for_permit, sender.ready()):
                with pytest.raises(ClosedError):
                    await closed


async def _still_waits(task: "asyncio.Task[None]") -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def test_ready_waits_for_a_permit_without_taking_it() -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        await sender.ready(nbytes=0)
        handle = await sender.send(pattern(0, 3))
        first, second = (asyncio.create_task(sender.ready(nbytes=0)) for _ in range(2))
        assert await _still_waits(first)
        await sender.ready()  # a receiver is connected
        first.cancel()
        await receiver.receive(handle)
        await second
        seen = sender.statistics()
        assert (seen.in_flight, seen.peak_in_flight, seen.waiting, sum(seen.permit_waits.counts)) == (
            0,
            1,
            0,
            0,
        )
        sender.send_nowait(pattern(1, 3))


async def test_ready_waits_for_memory_without_taking_it() -> None:
    nbytes = BIG * 8
    async with pair(arena_bytes=nbytes) as (sender, receiver):
        tensor = await receiver.receive(await sender.send(pattern(0, BIG)))
        ready = asyncio.create_task(sender.ready(nbytes=nbytes))
        assert await _still_waits(ready)
        await sender.ready(nbytes=0)  # a permit is free
        del tensor
        await ready
        assert sender.statistics().bytes_in_use == 0
        sender.send_nowait(pattern(1, BIG))


async def test_ready_waits_until_the_receiver_reads(address: str) -> None:
    async with (
        TensorReceiver(address, max_unclaimed_messages=None) as receiver,
        TensorSender(address, 1 << 20) as sender,
    ):
        await sender.ready(nbytes=0)
        [transport] = [peer.transport for peer in senders_of(receiver).values()]
        pause_reading(transport)
        while session_of(sender).transport.is_writable:
            sender.send_nowait(pattern(0, 500))
            await asyncio.sleep(0)  # until the next iteration, frames wait for others in their record
        ready = asyncio.create_task(sender.ready(nbytes=0))
        assert await _still_waits(ready)
        resume_reading(transport)
        await ready
        sender.send_nowait(pattern(0, 3))


async def test_ready_with_bytes_times_out_after_max_wait_s_and_states_the_cause(address: str) -> None:
    async with (
        TensorReceiver(address) as receiver,
        TensorSender(address, 1, BIG * 8, max_wait_s=SHORT_S) as sender,
    ):
        handle = await sender.send(pattern(0, BIG))
        with pytest.raises(WouldBlockError, match=r"^no permit was free for 0\.02 s") as caught:
            await sender.ready(nbytes=0)
        assert (caught.value.messages.limit, caught.value.messages.requested) == (1, 1)
        tensor = await receiver.receive(handle)
        await sender.ready(nbytes=0)
        with pytest.raises(WouldBlockError, match=r"^not enough shared memory was free for") as caught:
            await sender.ready(nbytes=8)
        assert caught.value.bytes.requested == 8
        del tensor


async def test_ready_refuses_bytes_that_are_never_free(address: str) -> None:
    async with TensorSender(address, arena_bytes=4096) as sender:
        with pytest.raises(ValueError, match="nbytes must be at least 0, got -1"):
            await sender.ready(nbytes=-1)
        with pytest.raises(TooLargeError) as caught:
            await sender.ready(nbytes=4097)
        assert (caught.value.limit, caught.value.requested) == (4096, 4097)
