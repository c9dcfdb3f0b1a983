"""What becomes of a peer that sends what the protocol forbids."""

import asyncio
import os
import secrets
from collections.abc import Sequence

import pytest
import torch

from aiotensor import (
    DiscardedError,
    PeerLostError,
    ProtocolError,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
)
from aiotensor.links.queue import QueueSenderLink
from aiotensor.protocol.frames import (
    VERSION,
    Bye,
    Discard,
    Discarded,
    End,
    Hello,
    Put,
    Release,
    Taken,
    ToReceiver,
    ToSender,
    Welcome,
    encode,
)
from tests.pairs import BIG, pair, pattern, settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Rogue:
    """A sender that says what it likes."""

    def __init__(self, queue: TensorQueue) -> None:
        self.id = secrets.token_hex(16)
        self.link = QueueSenderLink(queue, self.id)
        self.lost = asyncio.Event()

    async def open(self, hello: Hello | bytes) -> None:
        await self.link.open(hello if isinstance(hello, bytes) else encode(hello), self)

    def say(self, frame: ToReceiver | bytes, descriptors: Sequence[int] = ()) -> None:
        self.link.write(frame if isinstance(frame, bytes) else encode(frame), descriptors)

    def frame_arrived(self, data: bytes) -> None:
        pass

    def link_lost(self, reason: str) -> None:
        self.lost.set()


HELLO = Hello(VERSION, os.getpid(), 2, 1 << 20)


def put(**changes: object) -> Put:
    fields: dict[str, object] = {
        "message": 0,
        "tensor": 0,
        "dtype": "uint8",
        "shape": (3,),
        "device": "cpu",
        "placement": "inline",
        "payload": b"abc",
    }
    return Put(**{**fields, **changes})  # type: ignore[arg-type]


BROKEN: dict[str, list[ToReceiver | bytes]] = {
    "random bytes": [b"\xff\x00nonsense"],
    "an empty frame": [b""],
    "a frame for the other direction": [encode(Taken((0,)))],
    "another version": [],
    "a second introduction": [HELLO],
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
    "words after the goodbye": [Bye(), put()],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_sender_that_breaks_the_protocol_is_cut_off_and_harms_no_other(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = TensorQueue()
    async with TensorReceiver(queue) as receiver, TensorSender(queue) as honest:
        before = await honest.send(pattern(1, BIG))
        rogue = Rogue(queue)
        await rogue.open(Hello(VERSION + 1, 1, 1, 1) if name == "another version" else HELLO)
        for frame in BROKEN[name]:
            rogue.say(frame)
        await rogue.lost.wait()
        handle = TensorHandle(rogue.id, 0, 0, "uint8", (3,), "cpu")
        if name != "words after the goodbye":
            with pytest.raises(PeerLostError) as caught:
                await receiver.receive(handle)
            assert isinstance(caught.value.__cause__, ProtocolError)
            assert "broke the protocol" in caplog.text
        for seed, sent in ((1, before), (2, await honest.send(pattern(2, BIG)))):
            assert torch.equal(await receiver.receive(sent), pattern(seed, BIG))
        rogue.link.close()


async def test_a_tensor_whose_descriptor_did_not_arrive_is_discarded_alone() -> None:
    queue = TensorQueue()
    async with TensorReceiver(queue) as receiver:
        rogue = Rogue(queue)
        await rogue.open(HELLO)
        rogue.say(put(placement="memfd", payload=b"\x91\x00", last=True))
        rogue.say(put(message=1, last=True))
        assert torch.equal((await anext(receiver)).tensor, torch.tensor([97, 98, 99], dtype=torch.uint8))
        with pytest.raises(DiscardedError):
            await receiver.receive(TensorHandle(rogue.id, 0, 0, "uint8", (3,), "cpu"))
        rogue.link.close()


async def test_descriptors_of_a_sender_that_was_cut_off_are_closed() -> None:
    queue = TensorQueue()
    async with TensorReceiver(queue) as receiver:
        rogue = Rogue(queue)
        await rogue.open(HELLO)
        await until(lambda: receiver.statistics().senders == 1)
        read, write = os.pipe()
        rogue.say(b"nonsense", [os.dup(write)])
        rogue.say(put(), [write])  # arrives when its sender is known no more
        await rogue.lost.wait()
        assert await asyncio.to_thread(os.read, read, 1) == b""  # every writing end is closed
        os.close(read)
        assert receiver.statistics().unclaimed_tensors == 0


FORBIDDEN: dict[str, ToSender | bytes] = {
    "random bytes": b"\x00\x01",
    "another version": Welcome(VERSION + 1, 1),
    "taking what was never sent": Taken((99,)),
    "discarding what was never sent": Discarded((99,)),
    "a block that nobody sent": Release((99,)),
}


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_a_receiver_that_breaks_the_protocol_ends_the_senders_waits(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        await sender.send(pattern(0, BIG))
        waiting = asyncio.create_task(sender.send(pattern(1, 3)))
        await until(lambda: sender.statistics().waiting == 1 and receiver.statistics().senders == 1)
        frame = FORBIDDEN[name]
        receiver._links[sender.id].write(frame if isinstance(frame, bytes) else encode(frame))
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
                receiver._links[sender.id].write(encode(Taken((0,))))
                await until(lambda: sender.statistics().in_flight == 0)
