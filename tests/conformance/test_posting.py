"""Posted tensors are copied after `post` has returned, and every end of the copy reaches both sides."""

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest
import torch

from aiotensor import (
    ClosedError,
    DiscardedError,
    PeerLostError,
    SenderStatistics,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    TooLargeError,
    UnsupportedTensorError,
    WouldBlockError,
)
from aiotensor.transports.endpoints import Endpoint
from tests.cancellation.situations import held_back, strided
from tests.conformance.makers import PairMaker
from verification.internals import worker_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.promptly import promptly
from verification.waiting import settled, until

_SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "inline": lambda: pattern(1, 3),
    "contiguous": lambda: pattern(1, BIG),
    "strided": lambda: strided(1, BIG),
    "conjugate": lambda: torch.complex(pattern(1, BIG).double(), pattern(2, BIG).double()).conj(),
    "a leaf": lambda: pattern(1, BIG).double().requires_grad_(),
    "empty": lambda: pattern(1, BIG)[:0],
}


async def test_a_posted_tensor_arrives_bit_for_bit_and_its_source_is_not_modified(pairs: PairMaker) -> None:
    async with pairs.near_receiver() as (receiver, api, _):
        for name, make in _SOURCES.items():
            received = await receiver.receive(await api.call(_post, name))
            assert torch.equal(received, make()), name
            assert received.requires_grad == make().requires_grad, name
        received = await receiver.receive(await api.call(_post_allocated))
        assert torch.equal(received, pattern(1, BIG))


async def _post(state: peers.State, name: str) -> TensorHandle:
    await state.sender.ready()
    source, expected = _SOURCES[name](), _SOURCES[name]()
    handle = state.sender.post(source)
    await state.sender.copied(handle)
    assert torch.equal(source, expected)
    source.detach().zero_()
    return handle


async def _post_allocated(state: peers.State) -> TensorHandle:
    source = await state.sender.allocate((BIG,), torch.int64)
    handle = state.sender.post(source.copy_(pattern(1, BIG)))
    await state.sender.copied(handle)
    return handle


async def test_a_later_message_can_be_received_before_the_copy_of_a_posted_one_has_ended(
    pairs: PairMaker,
) -> None:
    async with pairs.near_sender() as (sender, engine):
        async with held_back(sender):
            posted = sender.post(strided(1, BIG))
            assert posted == TensorHandle(sender.id, 1, 0, "int64", (BIG,), "cpu")
            receiving = engine.start(peers.receive_pattern, posted, 1)
            copying = asyncio.create_task(sender.copied(posted))
            for seed, later in enumerate((sender.post(pattern(0, 3)), await sender.send(pattern(1, 3)))):
                assert await engine.call(peers.receive_pattern, later, seed)
            assert not copying.done()
            assert not receiving.done()
        await copying
        assert await receiving
        await settled(sender)


async def test_post_without_a_permit_or_memory_raises_and_acquires_nothing(
    pairs: PairMaker,
) -> None:
    async with pairs.near_sender(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, engine):
        allocated = await sender.allocate((5,), torch.int64)
        with pytest.raises(WouldBlockError, match="not enough shared memory"):
            sender.post(pattern(1, BIG))
        assert sender.statistics().in_flight == 0
        del allocated
        await settled(sender)

        handle = sender.post(pattern(2, BIG))
        for count in (3, BIG):
            with pytest.raises(WouldBlockError, match="no permit"):
                sender.post(pattern(3, count))
        assert (sender.statistics().in_flight, sender.statistics().bytes_in_use) == (1, BIG * 8)
        assert await engine.call(peers.receive_pattern, handle, 2)
        await settled(sender)
        assert await engine.call(peers.receive_pattern, sender.post(pattern(4, BIG)), 4)
        await settled(sender)


async def test_post_raises_would_block_error_if_the_receiver_does_not_read(pairs: PairMaker) -> None:
    async with pairs.clogged() as (sender, _, handles):
        for count in (3, BIG):
            with pytest.raises(WouldBlockError, match="slow to read"):
                sender.post(pattern(1, count))
        seen = sender.statistics()
        assert (seen.in_flight, seen.bytes_in_use) == (len(handles), 0)


async def test_post_without_a_receiver_raises_except_on_a_queue(
    endpoint: Endpoint,
) -> None:
    async with TensorSender(endpoint) as sender:
        if not isinstance(endpoint, TensorQueue):
            with pytest.raises(WouldBlockError, match=r"no receiver is connected|has not answered"):
                sender.post(pattern(1, BIG))
            await settled(sender)
            return
        handle = sender.post(pattern(1, BIG))
        await sender.copied(handle)
        async with TensorReceiver(endpoint) as receiver:
            assert torch.equal(await receiver.receive(handle), pattern(1, BIG))
            await settled(sender)


async def test_a_tensor_that_can_never_be_sent_takes_no_resources(pairs: PairMaker) -> None:
    async with pairs.near_sender(arena_bytes=BIG * 8) as (sender, _):
        before = _without_errors(sender)
        with pytest.raises(UnsupportedTensorError):
            sender.post(torch.ones(3).to_sparse())
        with pytest.raises(TooLargeError):
            sender.post(torch.ones(1).expand(BIG * 8))
        assert _without_errors(sender) == before
        assert sender.statistics().errors == {"UnsupportedTensorError": 1, "TooLargeError": 1}


def _without_errors(sender: TensorSender) -> SenderStatistics:
    return msgspec.structs.replace(sender.statistics(), errors={})


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_a_discard_before_the_copy_releases_everything_at_once_and_reaches_every_waiter(
    side: str, pairs: PairMaker
) -> None:
    async with pairs.near_sender() as (sender, engine):
        async with held_back(sender):
            handle = sender.post(strided(1, BIG))
            receiving = engine.start(peers.receive_pattern, handle, 1)
            copying = asyncio.create_task(sender.copied(handle))
            if side == "sender":
                sender.discard(handle)
                assert sender.statistics().in_flight == 0
            else:
                await engine.call(_discard, handle)
            await settled(sender)  # although the worker has not continued
            with pytest.raises(DiscardedError):
                await copying
            with pytest.raises(DiscardedError):
                await receiving
        assert sender.statistics().messages_discarded == 1
        following = sender.post(pattern(2, BIG))
        assert await engine.call(peers.receive_pattern, following, 2)


async def _discard(state: peers.State, handle: TensorHandle) -> None:
    state.receiver.discard(handle)


async def test_a_receiver_killed_before_the_copy_ends_the_wait_for_it(pairs: PairMaker) -> None:
    async with pairs.near_sender() as (sender, engine), held_back(sender):
        handle = sender.post(strided(1, BIG))
        with promptly():
            engine.kill()
            with pytest.raises(PeerLostError) as caught:
                await sender.copied(handle)
        assert caught.value.pid == engine.pid
        await settled(sender)
        with pytest.raises(PeerLostError):
            await sender.copied(handle)


async def test_a_sender_killed_before_the_copy_ends_the_wait_for_the_tensor_within_a_second(
    pairs: PairMaker,
) -> None:
    async with pairs.near_receiver() as (receiver, api, _):
        handle = await api.call(_post_held_back)
        receiving = asyncio.create_task(receiver.receive(handle))
        await until(lambda: receiver.statistics().waiting == 1)
        with promptly():
            api.kill()
            with pytest.raises(PeerLostError):
                await receiving


async def _post_held_back(state: peers.State) -> TensorHandle:
    await state.sender.ready()
    worker_of(state.sender).submit(threading.Event().wait)
    return state.sender.post(strided(1, BIG))


async def test_closing_waits_for_the_copies_and_posted_messages_can_still_be_received(
    pairs: PairMaker,
) -> None:
    async with pairs.near_sender() as (sender, engine):
        async with held_back(sender):
            handles = [sender.post(strided(seed, BIG)) for seed in range(3)]
            copying = asyncio.create_task(sender.copied(handles[2]))
            closing = asyncio.create_task(sender.aclose())
            await asyncio.sleep(0.01)
            with pytest.raises(ClosedError):
                sender.post(pattern(0, 3))
            assert not closing.done()
        await copying
        await closing
        for seed, handle in enumerate(handles):
            assert await engine.call(peers.receive_pattern, handle, seed)


async def test_cancelling_aclose_discards_posted_messages_and_leaks_nothing(pairs: PairMaker) -> None:
    async with pairs.near_sender() as (sender, engine):
        async with held_back(sender):
            handles = [sender.post(strided(seed, BIG)) for seed in range(3)]
            copying = asyncio.create_task(sender.copied(handles[2]))
            closing = asyncio.create_task(sender.aclose())
            await asyncio.sleep(0.01)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            with pytest.raises(ClosedError):
                await copying
        await settled(sender)
        for handle in handles:
            with pytest.raises((PeerLostError, DiscardedError)):
                await engine.call(peers.receive_pattern, handle, 0)


async def test_drain_covers_posted_messages(pairs: PairMaker) -> None:
    async with pairs.near_sender() as (sender, engine):
        async with held_back(sender):
            handle = sender.post(strided(1, BIG))
            draining = asyncio.create_task(sender.drain())
            await asyncio.sleep(0)
            assert not draining.done()
        await sender.copied(handle)
        assert not draining.done()
        assert await engine.call(peers.receive_pattern, handle, 1)
        await draining
