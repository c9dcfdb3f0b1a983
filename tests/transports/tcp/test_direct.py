"""Messages between engines: a peer with an engine that breaks the rules, and bytes that are no message."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from aiotensor import TensorReceiver, TensorSender
from aiotensor.engines import Engine, engine_maker
from aiotensor.errors import ProtocolError
from aiotensor.protocol.direct import (
    MAX_WRITES,
    Chosen,
    DirectMessage,
    Offer,
    Proved,
    Refused,
    Reserve,
    Reserved,
    Written,
    encode_direct,
    read_direct,
)
from aiotensor.protocol.frames import Attach, encode
from aiotensor.protocol.network import BATCH, BYE, DIRECT, OPENING, RECORD, Area, encode_area, read_batch
from tests.frames import hello
from verification.patterns import BIG, pattern
from verification.places import free_port
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TEST_BYTES = 64 << 10
ARENA = 8 << 20
SEGMENT = 4 * ARENA
ATTACH = bytes([RECORD]) + encode(Attach(0, "arena", SEGMENT))


class RawPeer:
    """A sender with a separate engine, which sends arbitrary messages."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.test = bytearray(TEST_BYTES)
        self.engine: Engine | None = None
        self._socket = socket
        self._parts: list[bytes] = []

    async def send(self, message: DirectMessage | bytes) -> None:
        await self._socket.send(message if isinstance(message, bytes) else encode_direct(message))

    async def receive(self) -> DirectMessage | str:
        """Return the next message between engines, or the last message of the receiver."""
        while True:
            if not self._parts:
                while not await self._socket.poll(1):
                    if self.engine is not None:
                        self.engine.poll()  # the receiver writes its test
                message = await self._socket.recv()
                batch = memoryview(message)
                self._parts = [bytes(one) for one in read_batch(batch)] if message[0] == BATCH else [message]
            message = self._parts.pop(0)
            if message[0] == BYE:
                return message[1:].decode()
            if message[0] == DIRECT:
                return read_direct(memoryview(message))

    async def prove(self) -> None:
        """Negotiate like a sender, until both sides use their engines."""
        await self.send(Chosen("nixl"))
        offer = await self.receive()
        assert isinstance(offer, Offer)
        engine = self.engine = engine_maker("nixl")()
        await self.send(Offer(engine.address, engine.register(memoryview(self.test))))
        engine.connect(offer.address)
        await self._write(b"0123456789abcdef" * (TEST_BYTES // 16), offer.key)
        await self.send(Proved(b"0123456789abcdef"))
        assert await self.receive() == Proved(bytes(self.test[:16]))
        assert self.test[:16] * (TEST_BYTES // 16) == self.test

    async def _write(self, data: bytes, key: bytes) -> None:
        assert self.engine is not None
        write = self.engine.write(memoryview(data), key, 0)
        while (write, "") not in self.engine.poll():
            await asyncio.sleep(0)

    async def write(self, data: bytes, key: bytes) -> None:
        """Write to reserved memory."""
        await self._write(data, key)


@asynccontextmanager
async def raw_peer(place: str) -> AsyncIterator[RawPeer]:
    """Connect a raw peer, after a valid hello."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(place)
        await socket.send(OPENING)
        assert await socket.recv() == OPENING
        await socket.send(bytes([RECORD]) + encode(hello(arena_bytes=ARENA)))
        peer = RawPeer(socket)
        try:
            yield peer
        finally:
            if peer.engine is not None:
                peer.engine.close()


@asynccontextmanager
async def parties(**options: Any) -> AsyncIterator[tuple[RawPeer, TensorSender, TensorReceiver]]:
    """Open a receiver with an honest sender and a raw peer."""
    place = f"tcp://127.0.0.1:{free_port()}"
    async with TensorReceiver(place, **options) as receiver, TensorSender(place) as honest:
        await honest.ready()
        async with raw_peer(place) as raw:
            await until(lambda: receiver.statistics().senders == 2)
            yield raw, honest, receiver


VIOLATIONS: dict[str, tuple[list[DirectMessage | bytes], str]] = {
    "a message between engines that cannot be decoded": ([bytes([DIRECT]) + b"\xc1"], "cannot be decoded"),
    "a second offer": ([Offer(b"", b"")], "offered an engine twice"),
    "a second choice": ([Chosen("nixl")], "chose an engine twice"),
    "a second proof": ([Proved(bytes(16))], "sent the proof of its engine twice"),
    "memory that was not requested": ([Reserved(0, b"key")], "that was not requested"),
    "a block without a segment": ([Reserve(0, 0, 0, 100)], "segment 0, which it never attached"),
    "a block outside of its segment": ([ATTACH, Reserve(0, 0, SEGMENT, 100)], "at an invalid position"),
    "a block that overlaps another": (
        [ATTACH, Reserve(0, 0, 0, 128), Reserve(1, 0, 64, 128)],
        "at an invalid position",
    ),
    "a block of another size": ([ATTACH, Reserve(0, 0, 0, 128), Reserve(1, 0, 0, 64)], "not 128"),
    "a block of no bytes": ([ATTACH, Reserve(0, 0, 0, 0)], "at an invalid position"),
    "more than its arena": ([ATTACH, Reserve(0, 0, 0, ARENA + 4096)], "more than its stated limit of"),
    "the same write again": ([ATTACH, Reserve(0, 0, 0, 100), Reserve(0, 0, 0, 100)], "twice, or too often"),
    "too many writes": (
        [ATTACH, *(Reserve(number, 0, 0, 100) for number in range(MAX_WRITES + 1))],
        "twice, or too often",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_closes_its_connection_and_affects_no_other(name: str) -> None:
    messages, reason = VIOLATIONS[name]
    async with parties(engine="nixl") as (raw, honest, receiver):
        await raw.prove()
        for message in messages:
            await raw.send(message)
        while not isinstance(answer := await raw.receive(), str):
            pass
        assert "this side broke the protocol" in answer
        assert reason in answer
        await until(lambda: receiver.statistics().senders_lost == 1)
        handle = await honest.send(pattern(1, BIG))
        assert torch.equal(await receiver.receive(handle), pattern(1, BIG))


async def test_memory_is_registered_once_for_all_writes_to_a_block() -> None:
    async with parties(engine="nixl") as (raw, _, _):
        await raw.prove()
        await raw.send(ATTACH)
        keys = []
        for number, (block, nbytes) in enumerate([(0, 4096), (0, 4096), (64 << 10, 100), (0, 4096)]):
            await raw.send(Reserve(number, 0, block, nbytes))
            answer = await raw.receive()
            assert isinstance(answer, Reserved)
            assert answer.write == number
            keys.append(answer.key)
            await raw.write(bytes(nbytes), answer.key)
            await raw.send(Written(number))
        assert keys[0] == keys[1] == keys[3] != keys[2]


async def test_a_wrong_proof_is_refused() -> None:
    async with parties(engine="nixl") as (raw, _, receiver):
        await raw.send(Chosen("nixl"))
        offer = await raw.receive()
        assert isinstance(offer, Offer)
        raw.engine = engine_maker("nixl")()
        await raw.send(Offer(raw.engine.address, raw.engine.register(memoryview(raw.test))))
        raw.engine.connect(offer.address)
        await raw.send(Proved(b"it was not sent."))
        assert isinstance(await raw.receive(), Proved)
        assert await raw.receive() == Refused("the test data of the peer did not arrive")
        assert receiver.statistics().engine_connections == 0


async def test_an_unusable_offer_is_refused() -> None:
    async with parties(engine="nixl") as (raw, _, _):
        await raw.send(Chosen("nixl"))
        assert isinstance(await raw.receive(), Offer)
        await raw.send(Offer(b"nonsense", b"nonsense"))
        assert await raw.receive() == Refused("the address of the peer is unusable: NIXL_ERR_MISMATCH")
        await raw.send(ATTACH)
        await raw.send(Reserve(0, 0, 0, 100))
        assert await raw.receive() == Reserved(0, b"")


async def test_another_engine_is_refused() -> None:
    async with parties(engine="nixl") as (raw, _, _):
        await raw.send(Chosen("other"))
        assert await raw.receive() == Refused("one side chose other, but the other side chose nixl")


async def test_without_an_engine_offers_are_refused_and_memory_has_no_key() -> None:
    async with parties() as (raw, _, _):
        await raw.send(Chosen("nixl"))
        assert await raw.receive() == Refused("the peer did not choose an engine")
        for ignored in (Offer(b"", b""), Proved(bytes(16)), Refused("no device"), Written(5)):
            await raw.send(ignored)
        await raw.send(ATTACH)
        await raw.send(Reserve(7, 0, 0, 100))
        assert await raw.receive() == Reserved(7, b"")
        await raw.send(encode_area(Area(0, 0)))  # it has the memory, for steps
        await raw.send(Reserve(8, 0, 0, 200))
        assert await raw.receive() == Reserved(8, b"")


MESSAGES = st.one_of(
    st.builds(Chosen, st.text(min_size=1, max_size=64)),
    st.builds(Offer, st.binary(max_size=500), st.binary(max_size=500)),
    st.builds(Refused, st.text(max_size=100)),
    st.builds(Proved, st.binary(min_size=16, max_size=16)),
    st.builds(Reserve, *[st.integers(0, 2**63 - 1)] * 4),
    st.builds(Reserved, st.integers(0, 2**63 - 1), st.binary(max_size=500)),
    st.builds(Written, st.integers(0, 2**63 - 1)),
)


@given(message=MESSAGES)
def test_a_message_is_read_as_it_was_written(message: DirectMessage) -> None:
    assert read_direct(memoryview(encode_direct(message))) == message


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        message = read_direct(memoryview(bytes([DIRECT]) + data))
    except ProtocolError:
        return
    assert isinstance(message, DirectMessage)


@pytest.mark.parametrize(
    "message",
    [
        Chosen("n" * 65),
        Chosen(""),
        Offer(bytes((64 << 10) + 1), b""),
        Offer(b"", bytes((64 << 10) + 1)),
        Refused("x" * 1025),
        Proved(bytes(15)),
        Proved(bytes(17)),
        Reserve(-1, 0, 0, 0),
        Reserve(0, 1 << 63, 0, 0),
        Reserved(0, bytes((64 << 10) + 1)),
    ],
)
def test_a_part_that_is_out_of_bounds_is_an_error(message: DirectMessage) -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        read_direct(memoryview(encode_direct(message)))
