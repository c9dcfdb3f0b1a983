"""Restarts of a receiver at its address, and tensors that were received before."""

import asyncio

import pytest
import torch

from aiotensor import (
    PeerLostError,
    TensorReceiver,
    TensorSender,
    WouldBlockError,
)
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.processes.peers import Peer
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_a_restarted_receiver_gets_only_tensors_sent_after_its_start(end: str, address: str) -> None:
    async with peers.peers(address, 2) as [first, second], TensorSender(address, 4) as sender:
        await first.call(peers.open_receiver)
        taken = await sender.send(pattern(0, BIG))
        assert await first.call(peers.receive_pattern, taken, 0, keep=True)
        lost = [await sender.send(pattern(seed, count)) for seed, count in ((1, BIG), (2, 5))]
        with pytest.raises(PeerLostError):
            async with sender.message() as message:
                await message.send(pattern(3, BIG))
                await _end(first, end)
                await until(lambda: sender.statistics().receivers_lost > 0)
                await message.send(pattern(4, 5))
        await settled(sender)
        with pytest.raises(WouldBlockError, match="no receiver"):
            sender.send_nowait(pattern(9, 5))
        waiting = [asyncio.create_task(sender.send(pattern(seed, BIG))) for seed in (5, 6)]
        await second.call(peers.open_receiver)
        for seed, send in zip((5, 6), waiting, strict=True):
            assert await second.call(peers.receive_pattern, await send, seed)
        # No call waits forever for a tensor that was sent to the first one.
        for handle in (taken, *lost):
            with pytest.raises(PeerLostError):
                await second.call(peers.receive_pattern, handle, 0)
        await settled(sender)


async def _end(child: Peer, how: str) -> None:
    if how == "kill":
        child.kill()
        await child.ended()
    else:
        await child.call(peers.close_receiver)


async def test_a_handle_of_an_earlier_receiver_raises_peer_lost_error(address: str) -> None:
    async with peers.peers(address, 1) as [child]:
        async with TensorReceiver(address):
            await child.call(peers.open_sender)
            handle = await child.call(peers.send_pattern, 1, BIG)
        async with TensorReceiver(address) as receiver:
            with pytest.raises(PeerLostError):
                await receiver.receive(handle)


async def test_a_view_survives_its_receiver_while_the_sender_uses_another(address: str) -> None:
    arena_bytes = 4 * BIG * 8
    async with TensorSender(address, arena_bytes=arena_bytes) as sender:
        async with TensorReceiver(address) as first:
            old = [await first.receive(await sender.send(pattern(seed, BIG))) for seed in range(3)]
        await until(lambda: sender.statistics().receivers_lost == 1)
        async with TensorReceiver(address) as second:
            for seed in range(10, 30):
                handle = await sender.send(pattern(seed, BIG))
                assert torch.equal(await second.receive(handle), pattern(seed, BIG))
            for seed, tensor in enumerate(old):
                assert torch.equal(tensor, pattern(seed, BIG))
            await settled(sender)
        for seed, tensor in enumerate(old):
            assert torch.equal(tensor, pattern(seed, BIG))
