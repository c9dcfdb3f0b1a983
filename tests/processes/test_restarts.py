"""A receiver that is restarted, what was received before, and senders that are refused."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from aiotensor import (
    DiscardedError,
    PeerLostError,
    TensorHandle,
    TensorReceiver,
    TensorSender,
    WouldBlockError,
)
from tests.pairs import BIG, pattern, settled, until
from tests.processes import peers
from tests.processes.peers import Peer

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_a_restarted_receiver_gets_what_is_sent_from_then_on(end: str, address: str) -> None:
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
        # Nobody waits for ever for what the first one was sent.
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


async def test_a_handle_given_to_a_new_receiver_before_its_sender_returns_is_lost_too(address: str) -> None:
    async with peers.peers(address, 1) as [child]:
        async with TensorReceiver(address):
            await child.call(peers.open_sender)
            handle = await child.call(peers.send_pattern, 1, BIG)
        async with TensorReceiver(address) as receiver:
            with pytest.raises(PeerLostError):
                await receiver.receive(handle)


async def test_a_view_survives_its_receiver_while_the_sender_goes_on_with_another(address: str) -> None:
    arena_bytes = 4 * BIG * 8
    async with TensorSender(address, arena_bytes=arena_bytes) as sender:
        async with TensorReceiver(address) as first:
            old = [await first.receive(await sender.send(pattern(seed, BIG))) for seed in range(3)]
        async with TensorReceiver(address) as second:
            for seed in range(10, 30):
                handle = await sender.send(pattern(seed, BIG))
                assert torch.equal(await second.receive(handle), pattern(seed, BIG))
            for seed, tensor in enumerate(old):
                assert torch.equal(tensor, pattern(seed, BIG))
            await settled(sender)
        for seed, tensor in enumerate(old):
            assert torch.equal(tensor, pattern(seed, BIG))


async def test_views_survive_the_end_of_their_sender_and_of_their_receiver(address: str) -> None:
    async with peers.peers(address, 2) as children:
        async with TensorReceiver(address) as receiver:
            views = []
            for seed, child in enumerate(children):
                await child.call(peers.open_sender)
                tensor = await receiver.receive(await child.call(peers.send_pattern, seed, BIG))
                views.append(tensor[100:200])
                del tensor
            children[0].kill()
            await children[0].ended()
            await until(lambda: receiver.statistics().senders == 1)
            assert torch.equal(views[0], pattern(0, BIG)[100:200])
            assert receiver.statistics().leases == 2
        for seed, view in enumerate(views):
            assert torch.equal(view, pattern(seed, BIG)[100:200])


_LIMITS: dict[str, Callable[[str], TensorReceiver]] = {
    "max_senders=1": lambda address: TensorReceiver(address, max_senders=1),
    "max_mapped_bytes=1073741824": lambda address: TensorReceiver(address, max_mapped_bytes=1 << 30),
    "max_unclaimed_messages=15": lambda address: TensorReceiver(address, max_unclaimed_messages=15),
}


@pytest.mark.parametrize("limit", _LIMITS)
async def test_a_sender_beyond_a_limit_is_told_which_and_is_served_when_there_is_room(
    limit: str, address: str
) -> None:
    async with peers.peers(address, 2) as [first, second], _LIMITS[limit](address) as receiver:
        await first.call(peers.open_sender)
        assert await _arrives(receiver, first)
        await second.call(peers.open_sender)
        for _ in range(3):
            with pytest.raises(PeerLostError, match=limit):
                await second.call(_send_and_drain)
        assert receiver.statistics().senders_refused > 0
        assert await _arrives(receiver, first)
        assert receiver.statistics().senders == 1
        await first.call(peers.close_sender)
        await until(lambda: receiver.statistics().senders == 0)
        assert await _arrives(receiver, second)
        assert receiver.statistics().senders_lost == 0


async def _send_and_drain(state: peers.State) -> None:
    await state.sender.send(pattern(0, 3))
    await state.sender.drain()
    await state.sender.send(pattern(0, 3))  # drained: then the loss was known before


async def _arrives(receiver: TensorReceiver, child: Peer) -> bool:
    handle: TensorHandle = await child.call(peers.send_pattern, 7, BIG)
    return torch.equal(await receiver.receive(handle), pattern(7, BIG))


async def test_last_words_of_a_sender_that_closes_are_received(address: str) -> None:
    async with peers.peers(address, 1) as [child], TensorReceiver(address) as receiver:
        await child.call(peers.open_sender, 64)
        handles = [await child.call(peers.send_pattern, seed, 50) for seed in range(50)]
        closing = child.start(peers.close_sender)
        for seed, handle in enumerate(handles):
            assert torch.equal(await receiver.receive(handle), pattern(seed, 50))
        await closing
        with pytest.raises(DiscardedError, match="closed"):
            await receiver.receive(TensorHandle(handles[0].sender, 50, 0, "int64", (1,), "cpu"))
