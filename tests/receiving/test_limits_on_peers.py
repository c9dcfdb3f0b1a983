"""A peer cannot exhaust the memory, descriptors, mappings or loop time of a receiver, nor delay others."""

import asyncio
import contextlib
import socket

import pytest
import torch

from aiotensor import PeerLostError, RefusedError, TensorHandle, TensorReceiver, TensorSender
from aiotensor.link.admission import MAX_UNIDENTIFIED
from aiotensor.protocol.frames import MAX_FRAMES, MAX_RECORD_BYTES, Discard, encode
from aiotensor.transports import records
from aiotensor.transports.endpoints import Endpoint
from aiotensor.transports.records import SocketTransport
from tests.frames import hello, put
from tests.pairs import endpoint
from tests.rogues import rogue_sender
from tests.transports.ends import record_pair
from verification.internals import admission_of
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def check_serving(place: Endpoint, receiver: TensorReceiver) -> None:
    """Check that a new sender is admitted, and its tensor arrives."""
    async with TensorSender(place) as sender:
        assert torch.equal(await receiver.receive(await sender.send(pattern(3, BIG))), pattern(3, BIG))
        assert sender.statistics().receivers_lost == 0


# Senders that do not read, and receivers that do not read


async def test_a_sender_that_does_not_read_its_answers_is_disconnected_at_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(records, "MAX_UNREAD_BYTES", 1 << 20)
    again = encode(*[put(block=2**63 - 1)] * MAX_FRAMES)  # each one is answered: the message was discarded
    with endpoint("unix") as place:
        async with TensorReceiver(place) as receiver, rogue_sender(place, reads=False) as rogue:
            rogue.write(put(), Discard(0))
            written = 0
            while not receiver.statistics().senders_lost:
                rogue.write(again)
                written += 1
                while not (rogue.is_writable or receiver.statistics().senders_lost):
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
            # Each answer has 11 bytes; a queued record counts with some overhead.
            assert written * MAX_FRAMES * 11 > 1 << 19, "it was disconnected long before the limit"
            assert written * MAX_FRAMES < 300_000
            assert "does not read" in caplog.text
            with pytest.raises(PeerLostError, match="does not read"):
                await receiver.receive(TensorHandle(rogue.id, 1, 0, "uint8", (3,), "cpu"))
            await check_serving(place, receiver)


async def test_a_sender_to_which_nothing_can_be_written_does_not_stay() -> None:
    near, far = record_pair()
    with endpoint("unix") as place, far:
        async with TensorReceiver(place) as receiver:
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(b"unread")
            transport = SocketTransport(near)
            transport.limit_queue(0)
            admission_of(receiver).connection_accepted(transport)
            far.send(encode(hello()))
            await until(lambda: transport.is_closed)
            seen = receiver.statistics()
            assert (seen.senders, seen.promised_messages, seen.mapped_bytes) == (0, 0, 0)
            assert seen.senders_lost == 1


# Messages that remain


@pytest.mark.usefixtures("link")
async def test_remaining_messages_of_closed_senders_count_against_the_limit() -> None:
    with endpoint() as place:
        async with TensorReceiver(place, max_unclaimed_messages=4) as receiver:
            sent: list[TensorHandle] = []
            for _ in range(2):
                async with TensorSender(place, 2) as short:
                    sent += [await short.send(pattern(0, 3)) for _ in range(2)]
            await until(lambda: receiver.statistics().unclaimed_tensors == 4)
            await until(lambda: receiver.statistics().senders == 0)
            assert receiver.statistics().promised_messages == 4
            async with TensorSender(place, 1) as refused:
                with pytest.raises(RefusedError, match="max_unclaimed_messages=4"):
                    await refused.ready()
            await receiver.receive(sent.pop())
            async with TensorSender(place, 1) as admitted:
                sent.append(await admitted.send(pattern(0, 3)))
                for handle in sent:
                    await receiver.receive(handle)
                await admitted.drain()


# Connections without a hello


async def test_a_burst_of_connections_yields_to_the_loop_and_replaces_the_oldest() -> None:
    with endpoint("unix") as place, contextlib.ExitStack() as stack:
        async with TensorReceiver(place) as receiver, TensorSender(place) as honest:
            await honest.ready()
            silent = [
                stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(100)
            ]
            for sock in silent:
                sock.setblocking(False)
                sock.connect(str(place).removeprefix("unix://"))
            for _ in range(2):
                await asyncio.sleep(0)
            assert receiver.statistics().senders_refused == 0, "only some were accepted in two iterations"

            replaced = len(silent) - MAX_UNIDENTIFIED
            await until(lambda: receiver.statistics().senders_refused == replaced)
            for sock in silent[:replaced]:  # the oldest
                assert b"a newer connection replaced it" in sock.recv(MAX_RECORD_BYTES)
            for sock in silent[replaced:]:
                with pytest.raises(BlockingIOError):
                    sock.recv(1)
            await check_serving(place, receiver)
            assert receiver.statistics().senders == 1
