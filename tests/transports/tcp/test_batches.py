"""The order of the messages of a sender between machines, and the messages that travel together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import zmq.asyncio

from aiotensor import TensorSender
from aiotensor.protocol.frames import (
    Frame,
    Put,
    Release,
    Taken,
    decode,
    encode,
)
from aiotensor.protocol.network import BATCH, FREE, MAX_BATCH, OPENING, RECORD, STEP, read_batch, read_step
from tests.frames import receiver_hello
from verification.places import free_port

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

ADMISSION = receiver_hello()
SMALL = torch.arange(64 << 10, dtype=torch.uint8)


class RawReceiver:
    """A socket at the address of a receiver, which has accepted one sender."""

    def __init__(self, sock: zmq.asyncio.Socket, peer: bytes) -> None:
        self._sock = sock
        self._peer = peer

    async def answer(self, *frames: Frame) -> None:
        await self._sock.send_multipart([self._peer, bytes([RECORD]) + encode(*frames)])

    async def messages(self) -> list[bytes]:
        """Return the next message, or those of the next batch."""
        _, message = await self._sock.recv_multipart()
        return [bytes(part) for part in read_batch(memoryview(message))] if message[0] == BATCH else [message]

    async def announced(self) -> tuple[list[list[int]], Put]:
        """Wait for the next tensor; return its frame, and the kinds of messages in each batch."""
        batches = []
        while True:
            messages = await self.messages()
            batches.append([one[0] for one in messages])
            for message in messages:
                for frame in decode(message[1:]) if message[0] == RECORD else ():
                    if isinstance(frame, Put):
                        return batches, frame


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[TensorSender, RawReceiver]]:
    """Open a sender that has connected, and is not admitted."""
    place = f"tcp://127.0.0.1:{free_port()}"
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.linger = 0
        sock.bind(place)
        async with TensorSender(place, 2) as sender:
            peer, opening = await sock.recv_multipart()
            assert opening == OPENING
            await sock.send_multipart([peer, OPENING])
            receiver = RawReceiver(sock, peer)
            [hello] = await receiver.messages()
            assert hello[0] == RECORD
            yield sender, receiver


async def test_a_small_tensor_travels_with_its_frame_and_freed_blocks() -> None:
    async with connected() as (sender, receiver):
        await receiver.answer(ADMISSION)
        await sender.send(SMALL)
        _, put = await receiver.announced()
        assert put.block is not None
        await receiver.answer(Taken((put.message,)), Release((put.block,)))
        await sender.drain()
        await sender.send(SMALL)
        batches, put = await receiver.announced()
        # On a busy machine, the moment that freed blocks wait for a next message may have passed.
        assert batches in ([[FREE, STEP, RECORD]], [[FREE], [STEP, RECORD]])
        assert put.block is not None
        await receiver.answer(Taken((put.message,)), Release((put.block,)))
        [free] = await receiver.messages()  # after a moment without a next message
        assert free[0] == FREE


async def test_a_batch_has_at_most_as_many_messages_as_a_receiver_accepts() -> None:
    tensors = [SMALL[: 9 << 10].clone() for _ in range(MAX_BATCH)]
    async with connected() as (sender, receiver):
        await receiver.answer(ADMISSION)
        await sender.ready()
        async with sender.message() as message:
            for tensor in tensors:
                await message.send(tensor)
        left, sizes = len(tensors), []
        while left:
            messages = await receiver.messages()
            sizes.append(len(messages))
            for one in messages:
                if one[0] == STEP:
                    step, data = read_step(one)
                    assert step.length == len(data) == tensors[0].nbytes
                    left -= 1
        assert 1 < max(sizes) <= MAX_BATCH
