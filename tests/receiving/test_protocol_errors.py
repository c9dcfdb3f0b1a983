"""What becomes of a peer that sends what the protocol forbids."""

import asyncio
import fcntl
import os
import secrets
import struct
from collections.abc import Sequence

import msgspec
import pytest
import torch

from aiotensor import (
    AioTensorError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    TensorHandle,
    TensorReceiver,
    TensorSender,
)
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Bye,
    Detach,
    Discard,
    Discarded,
    End,
    Hello,
    Put,
    Release,
    Taken,
    ToReceiver,
    ToSender,
    decode_to_sender,
    encode,
)
from aiotensor.receiving.mappings import MAX_SEGMENTS
from aiotensor.tensors.arena import segment_bytes
from aiotensor.transports.endpoints import Endpoint, connect
from tests.frames import put
from tests.pairs import endpoint, pair
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


class Rogue:
    """A sender that says what it likes."""

    def __init__(self, place: Endpoint) -> None:
        self.id = secrets.token_hex(16)
        self.link = connect(place, self.id)
        self.lost = asyncio.Event()
        self.heard: list[ToSender] = []

    async def open(self, **changes: object) -> None:
        self.hello = hello(sender=self.id, **changes)
        await self.link.open(self)

    def say(self, frame: ToReceiver | bytes, descriptors: Sequence[int] = ()) -> None:
        self.link.write(frame if isinstance(frame, bytes) else encode(frame), descriptors)

    def introduction(self) -> bytes:
        return encode(self.hello)

    def record_arrived(self, data: bytes | memoryview) -> None:
        self.heard += decode_to_sender(data)

    def link_lost(self, error: AioTensorError) -> None:
        self.link.close()
        self.lost.set()


def hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "version": VERSION,
        "pid": os.getpid(),
        "sender": "0" * 32,
        "max_concurrent_videos": 2,
        "arena_bytes": ARENA,
    }
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


ARENA = 1 << 20
WHERE = struct.Struct("<QQ")


BROKEN: dict[str, list[ToReceiver | bytes]] = {
    "random bytes": [b"\xff\x00nonsense"],
    "a frame for the other direction": [encode(Taken((0,)))],
    "a second introduction": [hello()],
    "an unknown dtype": [put(dtype="float7")],
    "a dtype that is a name in torch": [put(dtype="nn")],
    "an unknown placement": [put(placement="carrier pigeon")],
    "too few bytes": [put(payload=b"ab")],
    "too many bytes": [put(payload=b"abcd")],
    "a shape beyond all memory": [put(shape=(2**62, 2**62, 2**62))],
    "a gradient on whole numbers": [put(requires_grad=True)],
    "the same tensor twice": [put(), put()],
    "a tensor out of turn": [put(tensor=1)],
    "a tensor after the end": [put(last=True), put(tensor=1)],
    "a wrong count": [put(), End(0, 2)],
    "the end of nothing": [End(0, 0)],
    "the discarding of nothing": [Discard(5)],
    "an end twice": [put(last=True), End(0, 1)],
    "a count beyond all memory": [put(), End(0, 2**60)],
    "more messages than announced": [put(), put(message=1), put(message=2)],
    "a message out of turn": [put(message=1)],
    "a record that is too long": [b"a" * (MAX_RECORD_BYTES + 1)],
    "a place in no segment": [put(placement="arena", payload=WHERE.pack(0, 0), block=0)],
    "a place that cannot be read": [put(placement="arena", payload=b"here", block=0)],
    "the detaching of nothing": [Detach(0)],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_sender_that_breaks_the_protocol_is_cut_off_and_harms_no_other(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with endpoint() as place:
        await _cut_off(place, BROKEN[name], caplog)


# What is said of a segment of one page that is there.
MISPLACED: dict[str, ToReceiver] = {
    "beyond the end": put(shape=(3,), payload=WHERE.pack(0, 4094)),
    "far beyond the end": put(shape=(3,), payload=WHERE.pack(0, 2**63)),
    "larger than the segment": put(shape=(4097,), payload=WHERE.pack(0, 0)),
    "not aligned": put(dtype="int64", shape=(1,), payload=WHERE.pack(0, 4)),
    "no bytes": put(shape=(0,), payload=WHERE.pack(0, 0)),
    "no number": put(shape=(1,), payload=WHERE.pack(0, 0), block=None),
    "attached again": Attach(0, "arena", 4096),
}


@pytest.mark.parametrize("name", MISPLACED)
async def test_a_tensor_is_never_opened_outside_its_segment(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    frame = MISPLACED[name]
    if isinstance(frame, Put):
        block = None if name == "no number" else 0
        frame = msgspec.structs.replace(frame, placement="arena", block=block)
    with endpoint() as place:
        await _cut_off(place, [frame], caplog, segments=[Attach(0, "arena", 4096)])


@pytest.mark.parametrize(
    ("size", "seals", "announced"),
    [
        (4096, fcntl.F_SEAL_GROW, 4096),
        (4096, fcntl.F_SEAL_SHRINK, 8192),
        (8192, fcntl.F_SEAL_SHRINK, 4096),
        (segment_bytes(ARENA) + 4096, fcntl.F_SEAL_SHRINK, segment_bytes(ARENA) + 4096),
        (0, fcntl.F_SEAL_SHRINK, 0),
    ],
)
async def test_memory_that_could_shrink_or_is_not_what_was_announced_is_refused(
    size: int, seals: int, announced: int, caplog: pytest.LogCaptureFixture
) -> None:
    with endpoint() as place:
        await _cut_off(place, [], caplog, segments=[Attach(0, "arena", announced)], size=size, seals=seals)


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_sender_cannot_fill_the_table_of_mappings(
    keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by segments that it keeps attached, nor by those that only its tensors keep."""
    frames: list[ToReceiver] = []
    for number in range(MAX_SEGMENTS + 1):
        frames.append(Attach(number, "arena", 1))
        if keeps:
            where = WHERE.pack(number, 0)
            frames += [
                put(tensor=number, shape=(1,), placement="arena", payload=where, block=number),
                Detach(number),
            ]
    with endpoint() as place:
        await _cut_off(place, [], caplog, segments=frames, size=1)
    assert f"more than {MAX_SEGMENTS} segments" in caplog.text


async def test_segments_that_were_detached_and_are_not_in_use_make_room_for_others() -> None:
    with endpoint() as place:
        async with TensorReceiver(place) as receiver:
            rogue = Rogue(place)
            await rogue.open()
            for number in range(2 * MAX_SEGMENTS):
                _attach(rogue, Attach(number, "arena", 1), 1)
                rogue.say(Detach(number))
            rogue.say(put(last=True))
            assert (await anext(receiver)).handle.message == 0
            rogue.link.close()
            await until(lambda: receiver.statistics().senders == 0)


async def test_what_tensors_keep_of_detached_segments_counts_against_the_arena(
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = segment_bytes(ARENA) // 2
    frames: list[ToReceiver] = [
        Attach(0, "arena", half),
        put(shape=(1,), placement="arena", payload=WHERE.pack(0, 0), block=0),
        Detach(0),
        Attach(1, "arena", half + 1),
    ]
    with endpoint() as place:
        await _cut_off(place, [], caplog, segments=frames, size=half)
    assert f"attached {2 * half + 1} bytes" in caplog.text


def _attach(rogue: Rogue, segment: ToReceiver, size: int, seals: int = fcntl.F_SEAL_SHRINK) -> None:
    """Say a frame, with memory beside it."""
    memfd = os.memfd_create("rogue", os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, size)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, seals)
    rogue.say(segment, [memfd])
    os.close(memfd)


async def _cut_off(
    place: Endpoint,
    frames: Sequence[ToReceiver | bytes],
    caplog: pytest.LogCaptureFixture,
    *,
    segments: Sequence[ToReceiver] = (),
    size: int = 4096,
    seals: int = fcntl.F_SEAL_SHRINK,
) -> None:
    """Say forbidden things to a receiver, and see that only their sender hears of it."""
    async with TensorReceiver(place) as receiver, TensorSender(place) as honest:
        before = await honest.send(pattern(1, BIG))
        rogue = Rogue(place)
        await rogue.open()
        for segment in segments:
            _attach(rogue, segment, size, seals)
        for frame in frames:
            rogue.say(frame)
        await rogue.lost.wait()
        handle = TensorHandle(rogue.id, 0, 0, "uint8", (3,), "cpu")
        with pytest.raises(PeerLostError) as caught:
            await receiver.receive(handle)
        assert isinstance(caught.value.__cause__, ProtocolError)
        assert "broke the protocol" in caplog.text
        assert receiver.statistics().senders == 1
        for seed, sent in ((1, before), (2, await honest.send(pattern(2, BIG)))):
            assert torch.equal(await receiver.receive(sent), pattern(seed, BIG))


@pytest.mark.parametrize("link", ["unix"], indirect=True)
async def test_a_sender_that_comes_back_before_its_end_was_read_is_not_refused_for_its_own_memory() -> None:
    with endpoint() as place:
        async with TensorReceiver(place, max_mapped_bytes=ARENA, max_unclaimed_messages=2) as receiver:
            before, after = Rogue(place), Rogue(place)
            after.id = before.id
            await before.open()
            before.say(put(last=True))
            await anext(receiver)
            await after.open(first_message=1)
            after.say(put(message=1, last=True))
            assert (await anext(receiver)).handle.message == 1
            await before.lost.wait()
            assert receiver.statistics().senders_refused == 0
            after.link.close()
            await until(lambda: receiver.statistics().senders == 0)


async def test_what_follows_a_goodbye_is_not_read() -> None:
    with endpoint() as place:
        async with TensorReceiver(place) as receiver:
            rogue = Rogue(place)
            await rogue.open()
            rogue.say(encode(put(last=True), Bye(), put(message=1, last=True)))
            rogue.say(b"nonsense")
            await rogue.lost.wait()
            assert (await anext(receiver)).handle.message == 0
            with pytest.raises(DiscardedError, match="never sent"):
                await receiver.receive(TensorHandle(rogue.id, 1, 0, "uint8", (3,), "cpu"))


async def test_a_sender_whose_memory_does_not_arrive_is_refused_with_the_reason() -> None:
    with endpoint() as place:
        async with TensorReceiver(place) as receiver:
            rogue = Rogue(place)
            await rogue.open()
            rogue.say(Attach(0, "arena", 4096))
            await rogue.lost.wait()
            reasons = [frame.reason for frame in rogue.heard if isinstance(frame, Bye)]
            assert len(reasons) == 1
            assert "ulimit -n" in reasons[0]
            assert receiver.statistics().senders_refused == 1


async def test_descriptors_of_a_sender_that_was_cut_off_are_closed() -> None:
    with endpoint() as place:
        await _say_with_descriptors(place)


async def _say_with_descriptors(place: Endpoint) -> None:
    async with TensorReceiver(place) as receiver:
        rogue = Rogue(place)
        await rogue.open()
        await until(lambda: receiver.statistics().senders == 1)
        read, write = os.pipe()
        rogue.say(put(), [write])  # which needs none
        rogue.say(b"nonsense", [write])
        rogue.say(put(), [write])  # arrives when its sender is known no more
        os.close(write)
        await rogue.lost.wait()
        assert await asyncio.to_thread(os.read, read, 1) == b""  # every writing end is closed
        os.close(read)
        assert receiver.statistics().unclaimed_tensors == 0


FORBIDDEN: dict[str, ToSender | bytes] = {
    "random bytes": b"\x00\x01",
    "taking what was never sent": Taken((99,)),
    "discarding what was never sent": Discarded((99,)),
    "a block that nobody sent": Release((99,)),
    "a block that is still being written": Release((1,)),
}


def _say(receiver: TensorReceiver, sender: TensorSender, record: bytes) -> None:
    link = receiver._incoming.link_of(sender.id)
    assert link is not None
    link.write(record)


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_a_receiver_that_breaks_the_protocol_ends_the_senders_waits(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        await sender.send(pattern(0, BIG))
        waiting = asyncio.create_task(sender.send(pattern(1, 3)))
        await until(lambda: sender.statistics().waiting == 1 and receiver.statistics().senders == 1)
        frame = FORBIDDEN[name]
        _say(receiver, sender, frame if isinstance(frame, bytes) else encode(frame))
        with pytest.raises(PeerLostError, match="broke the protocol") as caught:
            await waiting
        assert isinstance(caught.value.__cause__, ProtocolError)
        assert "broke the protocol" in caplog.text
        await settled(sender)


async def test_taking_a_message_that_is_not_whole_breaks_the_protocol() -> None:
    async with pair() as (sender, receiver):
        with pytest.raises(PeerLostError, match="not whole"):
            async with sender.message() as message:
                await message.send(pattern(0, 3))
                await until(lambda: receiver.statistics().unclaimed_tensors == 1)
                _say(receiver, sender, encode(Taken((0,))))
                await until(lambda: sender.statistics().in_flight == 0)
