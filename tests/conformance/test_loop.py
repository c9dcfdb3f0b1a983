"""No operation blocks the event loop, and an idle pair does nothing."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from aiotensor import TensorHandle
from aiotensor.transports.endpoints import Endpoint
from tests import selection
from tests.conformance.makers import PairMaker, pairs_over
from tests.conformance.turns import Lengths, measured, some_turns, too_long
from verification.processes import peers, watch
from verification.waiting import settled, until

_BYTES = 150 << 20


async def _too_long(link: str, measure: Callable[[PairMaker], Awaitable[Lengths]]) -> Lengths:
    """Measure with a new pair in each attempt: no pair over a queue meets again."""

    async def attempt() -> Lengths:
        with pairs_over(link) as pairs:
            return await measure(pairs)

    return await too_long(attempt)


_everywhere = pytest.mark.parametrize("link", selection.LINKS)
_once = pytest.mark.parametrize(
    "mode", ["plain"], indirect=True
)  # what takes long takes as long in every mode


@_everywhere
@_once
async def test_no_call_of_a_sender_keeps_the_loop_busy_for_long(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(pairs: PairMaker) -> Lengths:
        lengths: Lengths = {}
        async with pairs.near_sender() as (sender, engine):
            with measured("allocate in fresh memory", lengths):
                allocated = await sender.allocate((_BYTES,), torch.uint8)
            allocated.fill_(1)
            with measured("send what was allocated", lengths):
                handle = await sender.send(allocated)
            await engine.call(_take, handle)
            await engine.call(peers.forget_tensors)
            with measured("free what was allocated", lengths):
                del allocated
                await settled(sender)
            with measured("send by a copy", lengths):
                handle = await sender.send(source)
            with measured("discard", lengths):
                sender.discard(handle)
                await settled(sender)
            with measured("send what has to be gathered", lengths):
                handle = await sender.send(source.view(-1, 2).t())
            await engine.call(_take, handle)
            with measured("close", lengths):
                await sender.aclose()
        return lengths

    assert await _too_long(link, measure) == {}


@_everywhere
@_once
async def test_a_send_and_an_aclose_that_are_cancelled_keep_the_loop_free(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(pairs: PairMaker) -> Lengths:
        lengths: Lengths = {}
        async with pairs.near_sender() as (sender, engine):
            await engine.call(_take, await sender.send(source))
            sending = asyncio.create_task(sender.send(source))
            with measured("cancel a send", lengths):
                await until(lambda: sender.statistics().bytes_in_use == 2 * _BYTES)
                sending.cancel()
                await until(lambda: sender.statistics().bytes_in_use == _BYTES)
            closing = asyncio.create_task(sender.aclose())
            with measured("cancel aclose", lengths):
                await asyncio.sleep(0)
                closing.cancel()
                await asyncio.wait([closing])
                await some_turns()
        assert closing.cancelled()
        return lengths

    assert await _too_long(link, measure) == {}


@_everywhere
@_once
async def test_the_death_of_a_receiver_keeps_the_loop_of_its_sender_free(link: str) -> None:
    async def measure(pairs: PairMaker) -> Lengths:
        lengths: Lengths = {}
        async with pairs.near_sender() as (sender, engine):
            await engine.call(_take, await sender.send(torch.ones(_BYTES, dtype=torch.uint8)))
            with measured("the receiver dies", lengths):
                engine.kill()
                await until(lambda: sender.statistics().receivers_lost == 1)
                await some_turns()
        return lengths

    assert await _too_long(link, measure) == {}


@_everywhere
@_once
async def test_no_call_of_a_receiver_keeps_the_loop_busy_for_long(link: str) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure(pairs: PairMaker) -> Lengths:
        async with pairs.near_sender() as (sender, engine):
            # In a new process, since the first use of a function may import modules.
            lengths = await engine.call(_copy_measured, await sender.send(source))
            lengths |= await engine.call(_receive_measured, await sender.send(source))
            lengths |= await engine.call(_discard_measured, await sender.send(source))
            await engine.call(_take, await sender.send(source))
            closing = engine.start(_a_sender_leaves_measured)
            await sender.aclose()
            return {**lengths, **await closing}

    assert await _too_long(link, measure) == {}


@_everywhere
@_once
async def test_closing_a_receiver_keeps_its_loop_free(link: str) -> None:
    async def measure(pairs: PairMaker) -> Lengths:
        async with pairs.near_sender() as (sender, engine):
            await engine.call(_take, await sender.send(torch.ones(_BYTES, dtype=torch.uint8)))
            await engine.call(peers.forget_tensors)
            lengths: Lengths = await engine.call(_close_measured)
        return lengths

    assert await _too_long(link, measure) == {}


async def _take(state: peers.State, handle: TensorHandle) -> None:
    """Take a tensor, and read all of it: from then on the memory is mapped here, page by page."""
    tensor = await state.receiver.receive(handle)
    assert int(tensor.sum()) == _BYTES
    state.tensors.append(tensor)


async def _copy_measured(state: peers.State, handle: TensorHandle) -> Lengths:
    lengths: Lengths = {}
    with measured("receive a copy", lengths):
        state.tensors.append(await state.receiver.receive(handle, copy=True))
    return lengths


async def _receive_measured(state: peers.State, handle: TensorHandle) -> Lengths:
    lengths: Lengths = {}
    with measured("receive", lengths):
        tensor = await state.receiver.receive(handle)
    assert int(tensor.sum()) == _BYTES
    with measured("free what was received", lengths):
        del tensor
        await until(lambda: state.receiver.statistics().leases == 0)
        await some_turns()
    return lengths


async def _discard_measured(state: peers.State, handle: TensorHandle) -> Lengths:
    lengths: Lengths = {}
    await until(lambda: state.receiver.statistics().unclaimed_tensors == 1)
    with measured("discard at the receiver", lengths):
        state.receiver.discard(handle)
        await until(lambda: state.receiver.statistics().leases == 0)
        await some_turns()
    return lengths


async def _a_sender_leaves_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    with measured("the sender leaves", lengths):
        await until(lambda: state.receiver.statistics().senders == 0)
        await some_turns()
    with measured("free the last tensor of a sender that left", lengths):
        state.tensors.pop()
        await until(lambda: state.receiver.statistics().mapped_bytes == 0)
        await some_turns()
    return lengths


async def _close_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    with measured("close the receiver", lengths):
        await state.receiver.aclose()
    return lengths


@pytest.mark.parametrize("mode", ["plain"], indirect=True)  # it takes seconds
async def test_an_idle_sender_and_receiver_use_no_processor_time(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 2) as [engine, api]:
        await engine.call(peers.open_receiver)
        await api.call(peers.open_sender)
        for count in (10, 100_000):
            handle: TensorHandle = await api.call(peers.send_pattern, 0, count)
            assert await engine.call(peers.receive_pattern, handle, 0)
        await api.call(peers.drain)
        assert await watch.become_idle([engine.pid, api.pid])
