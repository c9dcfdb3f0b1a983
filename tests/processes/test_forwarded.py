"""Forwarded tensors and the ends of processes: owner, forwarder and reader are killed at any moment."""

import asyncio
import contextlib
import mmap
import os
import random

import pytest
import torch

from aiotensor import (
    AioTensorError,
    PeerLostError,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
)
from aiotensor.broadcast import Publisher, Subscriber
from tests.selection import COMPLETE
from verification.patterns import BIG, pattern
from verification.processes import peers, watch
from verification.processes.peers import State
from verification.promptly import promptly
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1 << 20
_ROUNDS = 20 if COMPLETE else 4
_LONGEST_MOMENT_S = 0.2
_KEPT = 3  # tensors that a reader keeps


async def open_relay(state: State, downstream: TensorQueue) -> None:
    """Open a receiver at the endpoint of the process, and a sender to the next one."""
    await peers.open_receiver(state)
    sender = TensorSender(downstream)
    await sender.__aenter__()
    state.senders.append(sender)


async def relay(state: State, handle: TensorHandle, *, keep: bool = False) -> TensorHandle:
    """Send a tensor on."""
    tensor = await state.receiver.receive(handle)
    if keep:
        state.tensors.append(tensor)
    return await state.sender.send(tensor)


async def relay_for_ever(state: State) -> None:
    async for delivery in state.receiver:
        with contextlib.suppress(AioTensorError):
            await state.sender.send(delivery.tensor)


async def send_for_ever(state: State) -> None:
    seed = 0
    while True:
        seed += 1
        with contextlib.suppress(AioTensorError):
            await state.sender.send(pattern(seed, BIG))


async def read_for_ever(state: State) -> None:
    """Compare all tensors on arrival, and keep some, which `kept_are_right` compares again."""
    async for delivery in state.receiver:
        tensor = delivery.tensor
        assert torch.equal(tensor, pattern(int(tensor[0]), BIG))
        state.tensors.append(tensor)
        del state.tensors[:-_KEPT]


async def kept_are_right(state: State) -> bool:
    """Return whether the kept tensors have their values, and forget them."""
    is_right = all(torch.equal(tensor, pattern(int(tensor[0]), BIG)) for tensor in state.tensors)
    state.tensors.clear()
    return is_right


@pytest.mark.promise(39)
async def test_a_reader_keeps_valid_memory_after_the_process_that_forwarded_it_was_killed() -> None:
    upstream, downstream = TensorQueue(), TensorQueue()
    async with peers.peers(upstream, 1) as [forwarder], TensorReceiver(downstream) as reader:
        await forwarder.call(open_relay, downstream)
        async with TensorSender(upstream, arena_bytes=4 * BIG * 8) as owner:
            kept = await reader.receive(await forwarder.call(relay, await owner.send(pattern(1, BIG))))
            await forwarder.call(relay, await owner.send(pattern(2, BIG)))  # lost with the forwarder
            await forwarder.call(relay, await owner.send(pattern(3, BIG)), keep=True)
            forwarder.kill()
            await forwarder.ended()
            async with TensorReceiver(upstream) as receiver:  # in its place
                for seed in range(8):  # twice the arena
                    tensor = await receiver.receive(await owner.send(pattern(seed, BIG)))
                    assert torch.equal(tensor, pattern(seed, BIG))
                    del tensor
            assert torch.equal(kept, pattern(1, BIG))
            with promptly():
                del kept
                await until(lambda: not owner.statistics().holders)
            assert owner.statistics().bytes_in_use == 0


@pytest.mark.promise(39)
async def test_a_block_returns_within_a_second_after_its_reader_was_killed() -> None:
    upstream, downstream = TensorQueue(), TensorQueue()
    async with (
        peers.peers(downstream, 1) as [reader],
        TensorReceiver(upstream) as receiver,
        TensorSender(upstream) as owner,
        TensorSender(downstream) as forwarder,
    ):
        await reader.call(peers.open_receiver)
        received = await receiver.receive(await owner.send(pattern(1, BIG)))
        handle = await forwarder.send(received)
        assert await reader.call(peers.receive_pattern, handle, 1, keep=True)
        del received
        assert owner.statistics().bytes_in_use == BIG * 8
        with promptly():
            reader.kill()
            await until(lambda: owner.statistics().bytes_in_use == 0)


@pytest.mark.promise(30, 39)
async def test_the_memory_of_a_killed_owner_is_trimmed_to_the_tensors_of_all_readers() -> None:
    upstream, downstream = TensorQueue(), TensorQueue()
    async with (
        peers.peers(upstream, 1) as [owner],
        TensorReceiver(upstream) as receiver,
        TensorSender(downstream) as forwarder,
        TensorReceiver(downstream) as reader,
    ):
        await owner.call(peers.open_sender)
        tensors: list[torch.Tensor] = []
        for seed, nbytes in enumerate((32 * MIB, MIB, 32 * MIB, MIB)):
            handle = await owner.call(peers.send_pattern, seed, nbytes // 8)
            received = await receiver.receive(handle)
            sent_on = await reader.receive(await forwarder.send(received))
            assert sent_on.sum() == received.sum()
            tensors += [received, sent_on]
            del received, sent_on
        owner.kill()
        await owner.ended()
        for seed in (0, 2):  # the large ones, with the forwarder or the reader as the last user
            tensors[2 * seed] = tensors[2 * seed + 1] = pattern(0, 0)
        kept_by_forwarder, kept_by_reader = tensors[2], tensors[7]
        del tensors
        await until(lambda: watch.memfd_bytes(os.getpid()) <= 2 * MIB)
        assert torch.equal(kept_by_forwarder, pattern(1, MIB // 8))
        assert torch.equal(kept_by_reader, pattern(3, MIB // 8))


async def subscribe_and_relay(state: State, downstream: TensorQueue) -> TensorHandle:
    """Send a publication on."""
    subscriber = await state.stack.enter_async_context(Subscriber(state.endpoint))
    sender = await state.stack.enter_async_context(TensorSender(downstream))
    return await sender.send((await subscriber.receive()).message)


async def publish(state: State, seed: int) -> None:
    publisher = await state.stack.enter_async_context(Publisher(state.endpoint))
    await publisher.wait_for_subscribers(2)
    await publisher.publish(pattern(seed, BIG))


@pytest.mark.promise(30, 39)
async def test_the_last_reader_of_two_killed_processes_keeps_memory_that_others_trim() -> None:
    upstream, downstream = TensorQueue(), TensorQueue()
    async with (
        peers.peers(upstream, 2) as [owner, forwarder],
        Subscriber(upstream) as other,
        TensorReceiver(downstream) as reader,
    ):
        relaying = forwarder.start(subscribe_and_relay, downstream)
        await owner.call(publish, 1)
        publication = await other.receive()
        kept = await reader.receive(await relaying)
        for process in (forwarder, owner):
            process.kill()
            await process.ended()
        await until(lambda: other.statistics().publishers == 0)
        with pytest.raises(PeerLostError):
            await other.receive()
        del publication
        await other.aclose()  # returns all memory that no process has locked
        assert BIG * 8 <= watch.memfd_bytes(os.getpid()) < BIG * 8 + mmap.PAGESIZE
        assert torch.equal(kept, pattern(1, BIG))


@pytest.mark.promise(39)
@pytest.mark.parametrize("victim", ["owner", "forwarder", "reader"])
async def test_each_of_three_processes_can_be_killed_at_any_moment(
    victim: str, moments: random.Random
) -> None:
    for _ in range(_ROUNDS):
        upstream, downstream = TensorQueue(), TensorQueue()
        async with (
            peers.peers(upstream, 2) as [owner, forwarder],
            peers.peers(downstream, 1) as [reader],
        ):
            chain = {"owner": owner, "forwarder": forwarder, "reader": reader}
            await reader.call(peers.open_receiver)
            await forwarder.call(open_relay, downstream)
            await owner.call(peers.open_sender, 2, 8 * BIG * 8)
            reading = reader.start(read_for_ever)
            forwarder.start(relay_for_ever)
            owner.start(send_for_ever)
            await asyncio.sleep(moments.random() * _LONGEST_MOMENT_S)
            chain[victim].kill()
            await chain[victim].ended()
            if victim == "reader":
                await forwarder.call(peers.close_receiver)
            else:
                if victim == "forwarder":  # the owner writes to its memory until nothing is free
                    await asyncio.sleep(moments.random() * _LONGEST_MOMENT_S)
                assert await reader.call(kept_are_right)
                assert not reading.done(), reading.exception()
