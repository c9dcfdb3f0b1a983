"""The effect of a violation: it closes its connection, is logged, affects no other one, and leaks nothing.

The rules themselves are tested without sockets, in `tests/protocol/`.
"""

import asyncio
import fcntl
import os
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from aiotensor import PeerLostError, ProtocolError, TensorHandle, TensorReceiver, TensorSender
from aiotensor.memory.tensors import MAX_INLINE_BYTES
from aiotensor.protocol.frames import (
    MAX_HELLO_BYTES,
    MAX_RECORD_BYTES,
    Attach,
    Attributes,
    Detach,
    Frame,
    Put,
    Release,
    Taken,
    encode,
)
from aiotensor.transports.endpoints import Endpoint
from tests.frames import put, receiver_hello
from tests.pairs import endpoint, on_one_machine
from tests.rogues import ARENA_BYTES, SEALS, RogueSender, rogue_receiver, rogue_sender
from tests.selection import COMPLETE, LINKS, LOCAL_LINKS
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def on_links(names: Iterable[str], *on_all: str, links: Iterable[str] = LINKS) -> pytest.MarkDecorator:
    """Run a test with each name over Unix sockets in `make test`, and with some names over every link."""
    cases = [
        pytest.param(link, name, id=f"{link}-{name}")
        for link in links
        for name in names
        if COMPLETE or link == "unix" or name in on_all
    ]
    return pytest.mark.parametrize(("link", "name"), cases, indirect=["link"])


_PAGE = 4096
_PLACE = struct.Struct("<QQ")  # a segment and an offset


@asynccontextmanager
async def beside_an_honest_sender() -> AsyncIterator[tuple[Endpoint, TensorReceiver]]:
    """Open a receiver with an honest sender, and check at the end that nothing has affected that one."""
    with endpoint() as place:
        async with TensorReceiver(place) as receiver, TensorSender(place) as honest:
            before = await honest.send(pattern(1, BIG))
            await until(lambda: receiver.statistics().unclaimed_tensors == 1)
            yield place, receiver
            after = await honest.send(pattern(2, BIG))
            for seed, handle in ((1, before), (2, after)):
                assert torch.equal(await receiver.receive(handle), pattern(seed, BIG))
            assert honest.statistics().receivers_lost == 0
            assert receiver.statistics().senders == 1
            assert receiver.statistics().unclaimed_tensors == 0


async def check_violation(
    rogue: RogueSender, receiver: TensorReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Wait until a rogue was disconnected, and check the error and the log."""
    await rogue.is_lost.wait()
    with pytest.raises(PeerLostError) as caught:
        await receiver.receive(TensorHandle(rogue.id, 0, 0, "uint8", (3,), "cpu"))
    cause = caught.value.__cause__
    assert isinstance(cause, ProtocolError)
    assert cause.__traceback__ is None, "it would keep the record alive"
    logged = logged_violation(caplog)
    assert (logged["peer"], logged["reason"]) == (f"sender {rogue.id}", str(cause))
    assert receiver.statistics().senders_lost == 1
    assert receiver.statistics().senders == 1


def logged_violation(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """Return the fields of the only log record about a violation."""
    [logged] = [vars(one) for one in caplog.records if vars(one)["event"] == "protocol_broken"]
    return logged


VIOLATIONS: dict[str, Frame | bytes] = {
    "random bytes": b"\xff\x00nonsense",
    "a record that is too long": bytes(MAX_RECORD_BYTES + 1),
    "an unknown dtype": put(dtype="float7"),
    "an attribute of torch that is no dtype": put(dtype="nn"),
    "an unknown placement": put(placement="elsewhere"),
    "a shape that does not fit the bytes": put(shape=(4,)),
    "a shape larger than all memory": put(shape=(2**62, 2**62, 2**62)),
    "a gradient of integers": put(attributes=Attributes(requires_grad=True)),
    "an order that lacks a dimension": put(attributes=Attributes(order=(1,))),
    "too many bytes inline": put(shape=(MAX_INLINE_BYTES + 1,), payload=bytes(MAX_INLINE_BYTES + 1)),
    "a segment that was never attached": put(placement="arena", payload=_PLACE.pack(0, 0), block=0),
}


@pytest.mark.promise(24)
@on_links(VIOLATIONS, "random bytes", "a record that is too long", "an unknown dtype")
async def test_a_violation_closes_its_connection_and_affects_no_other(
    link: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with beside_an_honest_sender() as (place, receiver), rogue_sender(place) as rogue:
        rogue.write(VIOLATIONS[name])
        await check_violation(rogue, receiver, caplog)


OPENINGS: dict[str, bytes] = {
    "another frame": encode(put()),
    "random bytes": b"\xff\x00nonsense",
    "a long record": encode(put(payload=bytes(MAX_HELLO_BYTES))),
}


@on_links(OPENINGS, "random bytes")
async def test_a_connection_that_does_not_begin_with_a_hello_is_closed(
    link: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with beside_an_honest_sender() as (place, receiver):
        rogue = RogueSender(place)
        await rogue.connect(OPENINGS[name])
        await rogue.is_lost.wait()
        assert "broke the protocol" in caplog.text
        assert rogue.received == []
        assert receiver.statistics().senders_lost == 0


MISPLACED: dict[str, Put] = {
    "beyond the end": put(shape=(3,), payload=_PLACE.pack(0, _PAGE - 2)),
    "far beyond the end": put(shape=(3,), payload=_PLACE.pack(0, 2**63)),
    "larger than the segment": put(shape=(_PAGE + 1,), payload=_PLACE.pack(0, 0)),
    "not aligned": put(dtype="int64", shape=(1,), payload=_PLACE.pack(0, 4)),
    "empty": put(shape=(0,), payload=_PLACE.pack(0, 0)),
    "without a block": put(shape=(1,), payload=_PLACE.pack(0, 0)),
    "not readable": put(payload=b"short"),
}


@pytest.mark.promise(25)
@on_links(MISPLACED, links=LOCAL_LINKS)
async def test_a_tensor_is_never_opened_outside_its_segment(
    link: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    frame = MISPLACED[name]
    block = None if name == "without a block" else 0
    fields = {"message": 1, "placement": "arena", "block": block, "last": True}
    async with beside_an_honest_sender() as (place, receiver), rogue_sender(place) as rogue:
        rogue.attach(Attach(0, "arena", _PAGE))
        rogue.write(put(placement="arena", payload=_PLACE.pack(0, 0), block=0, last=True))
        await until(lambda: receiver.statistics().unclaimed_tensors == 2)
        assert _mapped() == 1
        rogue.write(put(dtype=frame.dtype, shape=frame.shape, payload=frame.payload, **fields))
        await check_violation(rogue, receiver, caplog)
        await until(lambda: _mapped() == 0)  # though the loss is remembered


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:rogue ")


def _placed(message: int, segment: int) -> Put:
    return put(message=message, placement="arena", payload=_PLACE.pack(segment, 0), block=0, last=True)


@pytest.mark.promise(26)
@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("link", ["unix"], indirect=True)
async def test_a_segment_is_unmapped_with_its_last_tensor_although_its_sender_is_connected() -> None:
    with endpoint() as place:
        async with TensorReceiver(place) as receiver, rogue_sender(place) as rogue:
            for number in range(20):
                rogue.attach(Attach(number, "arena", _PAGE))
                rogue.write(_placed(number, number), Detach(number))
            held = [(await anext(receiver)).tensor for _ in range(20)]
            assert _mapped() == 20
            held.clear()
            await until(lambda: _mapped() == 0)
            assert not rogue.is_lost.is_set()


@pytest.mark.promise(26)
@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("link", ["unix"], indirect=True)
async def test_a_segment_is_not_attached_again_while_tensors_use_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with beside_an_honest_sender() as (place, receiver), rogue_sender(place) as rogue:
        rogue.attach(Attach(0, "arena", _PAGE))
        rogue.write(_placed(0, 0), Detach(0))
        await until(lambda: receiver.statistics().unclaimed_tensors == 2)
        rogue.attach(Attach(0, "arena", _PAGE))
        await check_violation(rogue, receiver, caplog)


@pytest.mark.promise(24)
@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("link", ["unix"], indirect=True)
async def test_a_refused_sender_with_the_id_of_another_one_does_not_disconnect_it() -> None:
    with endpoint() as place:
        async with (
            TensorReceiver(place, max_mapped_bytes=ARENA_BYTES) as receiver,
            rogue_sender(place) as first,
        ):
            await until(lambda: receiver.statistics().senders == 1)
            async with rogue_sender(place, id=first.id, arena_bytes=2 * ARENA_BYTES) as second:
                await second.is_lost.wait()
            first.write(put(last=True))
            assert (await anext(receiver)).handle.sender == first.id


@pytest.mark.promise(26)
@pytest.mark.usefixtures("link")
@on_one_machine
@pytest.mark.parametrize(
    ("size", "seals", "announced"),
    [
        (_PAGE, fcntl.F_SEAL_GROW, _PAGE),
        (_PAGE, SEALS, 2 * _PAGE),
        (2 * _PAGE, SEALS, _PAGE),
        (8 * ARENA_BYTES, SEALS, 8 * ARENA_BYTES),
        (0, SEALS, 0),
        (_PAGE, fcntl.F_SEAL_SHRINK, _PAGE),
        (_PAGE, SEALS | fcntl.F_SEAL_WRITE, _PAGE),
    ],
)
async def test_a_segment_with_wrong_seals_or_size_is_refused(
    size: int, seals: int, announced: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with beside_an_honest_sender() as (place, receiver), rogue_sender(place) as rogue:
        rogue.attach(Attach(0, "arena", announced), size, seals)
        await check_violation(rogue, receiver, caplog)
        assert _mapped() == 0


@pytest.mark.usefixtures("link")
@on_one_machine
async def test_the_descriptors_of_a_rogue_are_closed() -> None:
    async with beside_an_honest_sender() as (place, _), rogue_sender(place) as rogue:
        read, write = os.pipe()
        rogue.write(put(), descriptors=[write])  # valid, and needs no descriptor
        rogue.write(b"nonsense", descriptors=[write])
        rogue.write(put(), descriptors=[write])  # arrives after the end of its connection
        os.close(write)
        await rogue.is_lost.wait()
        assert await asyncio.to_thread(os.read, read, 1) == b"", "every writing end is closed"
        os.close(read)


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("link", ["unix"], indirect=True)
async def test_a_sender_that_reconnects_replaces_its_earlier_connection() -> None:
    with endpoint() as place:
        async with TensorReceiver(place, max_mapped_bytes=ARENA_BYTES, max_unclaimed_messages=2) as receiver:
            async with rogue_sender(place) as before:
                before.write(put(last=True))
                await until(lambda: receiver.statistics().unclaimed_tensors == 1)
                async with rogue_sender(place, id=before.id, first=1) as after:
                    after.write(put(message=1, last=True))
                    await before.is_lost.wait()
                    with pytest.raises(PeerLostError):
                        await receiver.receive(TensorHandle(before.id, 0, 0, "uint8", (3,), "cpu"))
                    await receiver.receive(TensorHandle(before.id, 1, 0, "uint8", (3,), "cpu"))
                    statistics = receiver.statistics()
                    assert (statistics.senders, statistics.senders_refused) == (1, 0)
            await until(lambda: receiver.statistics().senders == 0)


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("link", ["unix"], indirect=True)
async def test_a_sender_that_repeats_numbers_of_messages_is_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with beside_an_honest_sender() as (place, receiver), rogue_sender(place) as before:
        before.write(put(last=True))
        await until(lambda: receiver.statistics().unclaimed_tensors == 2)
        async with rogue_sender(place, id=before.id, first=0) as after:
            await after.is_lost.wait()
            assert after.received == []
        await before.is_lost.wait()
        assert "reuses numbers of messages" in caplog.text


# Receivers that violate the protocol

FORBIDDEN: dict[str, Frame | bytes] = {
    "random bytes": b"\x00\x01",
    "a second hello": receiver_hello(),
    "a tensor": put(),
    "an answer to a message that was never sent": Taken((99,)),
    "a block that was never sent": Release((99,)),
    "a block that is released twice": Release((0, 0)),
}


@on_links(FORBIDDEN, "random bytes", "a block that is released twice")
async def test_a_violation_of_the_receiver_ends_all_waits_of_the_sender(
    link: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with endpoint() as place:
        async with rogue_receiver(place, max_concurrent_videos=1) as (sender, rogue):
            await sender.send(pattern(0, BIG))
            waiting = asyncio.create_task(sender.send(pattern(1, 3)))
            await until(lambda: sender.statistics().waiting == 1 and bool(rogue.received))
            rogue.write(FORBIDDEN[name])
            with pytest.raises(PeerLostError, match="broke the protocol") as caught:
                await waiting
            cause = caught.value.__cause__
            assert isinstance(cause, ProtocolError)
            assert cause.__traceback__ is None, "it would keep the record alive"
            logged = logged_violation(caplog)
            assert (logged["peer"], logged["reason"]) == ("the receiver", str(cause))
            assert sender.statistics().in_flight == 0
            await rogue.is_lost.wait()
