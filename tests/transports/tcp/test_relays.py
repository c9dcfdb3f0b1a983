"""Connections through a relay that delays bytes or limits their rate, as a long or a slow network does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from aiotensor import DiscardedError, TensorReceiver, TensorSender
from verification.patterns import BIG, pattern
from verification.places import free_port
from verification.waiting import settled, until

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("nothing_left_behind")]

_CHUNK_BYTES = 256 << 10


@asynccontextmanager
async def relay(*, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> AsyncIterator[tuple[str, str]]:
    """Return an address for the listening side, and the address of the relay to it."""
    port = free_port()
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_forward(reader, there_writer, delay_s, bytes_per_s))
                both.create_task(_forward(there_reader, writer, delay_s, bytes_per_s))
        finally:
            writer.close()
            there_writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        listening, entry = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield listening, entry
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, bytes_per_s: float
) -> None:
    """Forward all bytes after a delay, or at a rate."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def write() -> None:
        while True:
            due, data = await arrived.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                writer.close()
                return
            writer.write(data)

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        while True:
            data = await reader.read(_CHUNK_BYTES)
            arrived.put_nowait((loop.time() + delay_s, data))
            if not data:
                break
            if bytes_per_s:
                await asyncio.sleep(len(data) / bytes_per_s)


async def test_values_are_exact_over_a_long_distance() -> None:
    async with (
        relay(delay_s=0.05) as (listening, entry),
        TensorReceiver(listening) as receiver,
        TensorSender(entry) as sender,
    ):
        sent = {seed: await sender.send(pattern(seed, (3, BIG)[seed % 2])) for seed in range(6)}
        for seed, handle in reversed(sent.items()):
            assert torch.equal(await receiver.receive(handle), pattern(seed, (3, BIG)[seed % 2]))
        message = await sender.message().__aenter__()
        discarded = await message.send(pattern(7, BIG))
        receiver.discard(discarded)
        with pytest.raises(DiscardedError):
            await receiver.receive(discarded)
        await until(lambda: sender.statistics().messages_discarded == 1)
        with pytest.raises(DiscardedError):
            await message.__aexit__(None, None, None)
        await settled(sender)


async def test_a_small_tensor_overtakes_a_large_one_on_a_slow_network() -> None:
    async with (
        relay(bytes_per_s=100e6) as (listening, entry),
        TensorReceiver(listening) as receiver,
        TensorSender(entry) as sender,
    ):
        await sender.ready()
        large = torch.ones(192 << 20, dtype=torch.uint8)
        sending = asyncio.create_task(sender.send(large))
        await until(lambda: sender.statistics().bytes_in_use == large.nbytes)
        for seed, count in enumerate((3, 5000)):
            assert torch.equal(
                await receiver.receive(await sender.send(pattern(seed, count))), pattern(seed, count)
            )
        assert not sending.done()
        assert torch.equal(await receiver.receive(await sending), large)
