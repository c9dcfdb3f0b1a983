"""`ready` returns once a receiver has admitted the sender, and no earlier."""

import asyncio

import pytest

from aiotensor import (
    ClosedError,
    PeerLostError,
    RefusedError,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    WouldBlockError,
    blocking,
)
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import MAX_RECORD_BYTES, VERSION, Welcome
from tests.bare_peers import BareReceiver
from tests.pairs import endpoint
from verification.fuzz.listening import waiting_at
from verification.internals import pipeline_of
from verification.patterns import pattern
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


async def test_ready_waits_for_the_admission_after_the_welcome() -> None:
    with endpoint("unix") as place, waiting_at(str(place)) as listener:
        async with TensorSender(place) as sender:
            probe = asyncio.create_task(sender.ready())
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            with sock:
                sock.setblocking(False)
                await BareReceiver(sock).say(Welcome(VERSION, 7))
                await until(lambda: pipeline_of(sender).sessions.receiver_pid == 7)
                assert not probe.done()
                await BareReceiver(sock).say(Close("max_senders=0", is_refusal=True))
                with pytest.raises(
                    RefusedError, match=r"the receiver \(pid 7\) refused .*max_senders=0"
                ) as no:
                    await probe
                assert no.value.pid == 7
            assert sender.statistics().errors == {"RefusedError": 1}


async def test_ready_waits_for_the_next_receiver_when_one_closes(address: str) -> None:
    async with TensorSender(address) as sender:
        async with TensorReceiver(address):
            await sender.ready()
        await until(lambda: sender.receiver_id is None)
        probe = asyncio.create_task(sender.ready())
        async with TensorReceiver(address):
            await probe


async def test_ready_keeps_waiting_when_a_receiver_is_lost_before_it_answers(address: str) -> None:
    async with TensorSender(address) as sender:
        probe = asyncio.create_task(sender.ready())
        with waiting_at(address) as listener:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.close()
        async with TensorReceiver(address):
            await probe


async def test_ready_times_out_after_max_wait_s_and_states_the_cause(address: str) -> None:
    async with TensorSender(address, max_wait_s=SHORT_S) as sender:
        with pytest.raises(WouldBlockError, match=r"no receiver was connected for 0\.02 s"):
            await sender.ready()
        with waiting_at(address) as listener:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            with sock:
                sock.setblocking(False)
                assert await asyncio.get_running_loop().sock_recv(sock, MAX_RECORD_BYTES)
                with pytest.raises(WouldBlockError, match=r"the receiver has not answered for 0\.02 s"):
                    await sender.ready()
        assert sender.statistics().errors == {"UnavailableError": 2}


@pytest.mark.usefixtures("link")
async def test_closing_and_cancelling_end_ready() -> None:
    with endpoint() as place:
        async with TensorSender(place) as sender:
            first, second = (asyncio.create_task(sender.ready()) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            await sender.aclose()
            for closed in (second, sender.ready()):
                with pytest.raises(ClosedError):
                    await closed


async def test_ready_on_a_closed_queue_raises_peer_lost_error() -> None:
    queue = TensorQueue()
    receiver = TensorReceiver(queue)
    async with receiver, TensorSender(queue) as sender:
        await sender.ready()
        queue.close()
        await receiver.aclose()
        await until(lambda: sender.receiver_id is None)
        with pytest.raises(PeerLostError):
            await sender.ready()


async def test_blocking_ready_waits_for_the_admission_or_its_timeout(address: str) -> None:
    def probe() -> None:
        with blocking.TensorSender(address) as sender:
            with pytest.raises(TimeoutError):
                sender.ready(timeout=SHORT_S)
            loop.call_soon_threadsafe(opened.set_result, None)
            sender.ready()

    loop = asyncio.get_running_loop()
    opened: asyncio.Future[None] = loop.create_future()
    probing = asyncio.create_task(asyncio.to_thread(probe))
    await opened
    async with TensorReceiver(address):
        await probing
