"""A peer that is not admitted gets `RefusedError`, on both sides; nothing is retried in the background."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiotensor import RefusedError, TensorHandle, TensorReceiver, TensorSender, WouldBlockError
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Close,
    Frame,
    Hello,
    Put,
    decode,
    encode,
)
from tests.bare_peers import BareReceiver
from tests.frames import receiver_hello
from tests.pairs import endpoint
from tests.rogues import RogueSender, rogue_sender
from verification.fuzz.listening import waiting_at
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def _send_on(sender: TensorSender) -> None:
    """Send until it fails: the answer to the first one may still be on its way."""
    while True:
        await sender.send(pattern(0, 3))
        await asyncio.sleep(0)


@pytest.mark.usefixtures("link")
async def test_waits_for_the_tensors_of_a_sender_of_another_version_end_with_the_refusal() -> None:
    with endpoint() as place:
        async with TensorReceiver(place) as receiver, TensorSender(place) as honest:
            await honest.ready()
            rogue = RogueSender(place)
            handle = TensorHandle(rogue.id, 0, 0, "uint8", (3,), "cpu")
            waiting = asyncio.create_task(receiver.receive(handle))
            await rogue.connect(encode(rogue.hello(version=VERSION + 1)))
            await rogue.is_lost.wait()
            hello, close = rogue.received
            assert isinstance(hello, Hello)
            assert (hello.version, hello.role, hello.is_admitted) == (VERSION, "receiver", False)
            assert isinstance(close, Close)
            assert close.is_refusal
            assert "install the same version of aiotensor" in close.reason
            for receiving in (waiting, receiver.arrived(handle)):
                with pytest.raises(RefusedError, match=f"protocol version {VERSION + 1}") as no:
                    await receiving
                assert no.value.pid == os.getpid()
            assert receiver.statistics().senders_refused == 1
            assert receiver.statistics().senders_lost == 0
            await receiver.receive(await honest.send(pattern(0, 3)))


async def test_send_nowait_raises_refused_error_until_the_refusing_receiver_is_gone(address: str) -> None:
    async with TensorSender(address) as first, TensorSender(address) as second:
        async with TensorReceiver(address, max_senders=1):
            await first.ready()
            with pytest.raises(RefusedError):
                await second.ready()
            lost = second.statistics().receivers_lost  # 2 if it was refused before `ready` as well
            with pytest.raises(RefusedError, match="max_senders=1"):
                second.send_nowait(pattern(0, 3))  # it connects again, and the answer has not arrived
            with pytest.raises(RefusedError, match="max_senders=1"):
                second.send_nowait(pattern(0, 3))
        await until(lambda: second.statistics().receivers_lost == lost + 1)
        with pytest.raises(WouldBlockError, match="no receiver is connected"):
            second.send_nowait(pattern(0, 3))
        async with TensorReceiver(address) as receiver:
            await second.ready()
            handle = second.send_nowait(pattern(0, 3))
            assert (await receiver.receive(handle)).tolist() == pattern(0, 3).tolist()


@pytest.mark.parametrize("asks", ["send", "send_nowait"])
async def test_a_refused_sender_announces_nothing_until_it_is_admitted(address: str, asks: str) -> None:
    async with TensorSender(address) as sender:
        await _refuse(sender, address)
        waiting = asyncio.create_task(_send_on(sender))
        if asks == "send":
            await until(lambda: sender.statistics().in_flight == 1)
        else:
            waiting.cancel()
            with pytest.raises(WouldBlockError, match="no receiver is connected"):
                sender.send_nowait(pattern(0, 3))
        with waiting_at(address) as listener:
            async with _accepted(listener) as (sock, receiver):
                [hello] = await _read(sock)
                assert isinstance(hello, Hello)
                with pytest.raises(WouldBlockError, match=r"the receiver at .* has not answered"):
                    sender.send_nowait(pattern(0, 3))
                waiting.cancel()
                await receiver.say(receiver_hello())
                await sender.ready()
                handle = sender.send_nowait(pattern(0, 3))
                [first, *_] = await _read(sock)
                assert isinstance(first, Put)
                assert first.message == handle.message == 0


async def _refuse(sender: TensorSender, address: str) -> None:
    """Refuse a sender, and be gone."""
    with waiting_at(address) as listener:
        ready = asyncio.create_task(sender.ready())
        async with _accepted(listener) as (_, receiver):
            await receiver.say(receiver_hello(is_admitted=False), Close("max_senders=1", is_refusal=True))
            with pytest.raises(RefusedError):
                await ready


@asynccontextmanager
async def _accepted(listener: socket.socket) -> AsyncIterator[tuple[socket.socket, BareReceiver]]:
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    with sock:
        sock.setblocking(False)
        yield sock, BareReceiver(sock)


async def _read(sock: socket.socket) -> list[Frame]:
    """Return the frames of the next record."""
    return decode(await asyncio.get_running_loop().sock_recv(sock, MAX_RECORD_BYTES))


async def test_a_receiver_of_another_version_refuses_every_wait_of_the_sender(address: str) -> None:
    with waiting_at(address) as listener:
        async with TensorSender(address, 1) as sender:
            sent = await sender.send(pattern(0, 3))
            waiting = asyncio.create_task(sender.send(pattern(0, 3)))
            draining = asyncio.create_task(sender.drain())
            for waits in ([waiting, draining], []):
                asking = [*waits, asyncio.create_task(sender.ready())]  # which connects again
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                with sock:
                    sock.setblocking(False)
                    await BareReceiver(sock).say(receiver_hello(version=VERSION + 1))
                    for call in asking:
                        with pytest.raises(
                            RefusedError, match=f"version {VERSION + 1}.*install the same"
                        ) as no:
                            await call
                        assert no.value.pid == 7
            assert sender.statistics().errors == {"RefusedError": 4}
            del sent


async def test_a_sender_whose_memory_does_not_arrive_is_disconnected_and_not_refused() -> None:
    with endpoint("unix") as place:
        async with TensorReceiver(place), rogue_sender(place) as rogue:
            rogue.write(Attach(0, "arena", 4096))
            await rogue.is_lost.wait()
            [close] = [frame for frame in rogue.received if isinstance(frame, Close)]
            assert "ulimit -n" in close.reason
            assert not close.is_refusal
