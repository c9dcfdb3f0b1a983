"""Tensors arrive in another process complete and once, with their values, and stay valid."""

import asyncio
import gc
import os
from collections.abc import Callable

import pytest
import torch

from aiotensor import (
    AlreadyTakenError,
    DiscardedError,
    TensorHandle,
    TensorReceiver,
    TensorSender,
    TooLargeError,
    UnsupportedTensorError,
)
from aiotensor.transports.endpoints import Endpoint
from tests.conformance.makers import PairMaker
from verification.patterns import BIG, pattern
from verification.processes import peers, watch
from verification.waiting import settled, until

_COLUMNS = 100


def _numbers(rows: int) -> torch.Tensor:
    return torch.arange(rows * _COLUMNS, dtype=torch.float32).reshape(rows, _COLUMNS) - 7


# A few of those in tests/test_values.py: one of each way in which values can go astray.
_VALUES: dict[str, Callable[[int], torch.Tensor]] = {
    "a slice": lambda rows: _numbers(rows + 9)[5:-4, 3:-3],
    "transposed": lambda rows: _numbers(rows).t(),
    "expanded": lambda rows: _numbers(1).expand(rows, -1),
    "conjugate": lambda rows: torch.complex(_numbers(rows), _numbers(rows)).conj(),
    "negative": lambda rows: torch.complex(_numbers(rows), _numbers(rows)).conj().imag,
    "of no dimension": lambda rows: _numbers(rows)[0, 5],
    "empty": lambda rows: _numbers(rows)[:0],
    "bool": lambda rows: _numbers(rows) % 3 == 0,
    "bfloat16": lambda rows: _numbers(rows).to(torch.bfloat16),
    "float8": lambda rows: (_numbers(rows) % 100).to(torch.float8_e4m3fn),
    "a leaf": lambda rows: _numbers(rows).requires_grad_(),
}


@pytest.mark.parametrize("rows", [5, 5000], ids=["small", "large"])
async def test_values_arrive_in_another_process_bit_for_bit(rows: int, pairs: PairMaker) -> None:
    async with pairs.near_receiver() as (receiver, api, _):
        for name, make in _VALUES.items():
            received = await receiver.receive(await api.call(_send_values, name, rows))
            wanted = make(rows)
            assert (received.dtype, received.shape) == (wanted.dtype, wanted.shape), name
            assert received.requires_grad == wanted.requires_grad, name
            assert torch.equal(_bits(received), _bits(wanted.resolve_conj().resolve_neg())), name


async def _send_values(state: peers.State, name: str, rows: int) -> TensorHandle:
    return await state.sender.send(_VALUES[name](rows))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("count", [100, 1 << 16, BIG], ids=["small", "medium", "large"])
async def test_the_senders_tensor_may_change_as_soon_as_send_has_returned(
    count: int, pairs: PairMaker
) -> None:
    async with pairs.near_sender() as (sender, engine):
        for seed in (3, 4):  # the first in fresh memory, the second in warm
            tensor = pattern(seed, count)
            address = tensor.data_ptr()
            handle = await sender.send(tensor)
            tensor.fill_(-1)
            assert tensor.data_ptr() == address
            assert await engine.call(peers.receive_pattern, handle, seed)
            await settled(sender)


async def test_sending_a_slice_copies_only_its_own_bytes(pairs: PairMaker) -> None:
    async with pairs.near_sender(arena_bytes=BIG * 8) as (sender, engine):
        whole = pattern(0, BIG * 10)
        handle = await sender.send(whole[BIG * 3 : BIG * 4])  # the whole would never fit
        assert await engine.call(peers.receive_pattern, handle, BIG * 3 * 31, keep=True)
        assert await engine.call(_storage_bytes) == BIG * 8
        assert sender.statistics().bytes_in_use == BIG * 8


async def _storage_bytes(state: peers.State) -> int:
    return state.tensors[-1].untyped_storage().nbytes()


async def test_a_view_stays_valid_while_the_memory_around_it_is_used_again_and_again(
    pairs: PairMaker,
) -> None:
    async with pairs.near_receiver(arena_bytes=3 * BIG * 8) as (receiver, api, _):
        tensors = [await receiver.receive(await api.call(peers.send_pattern, seed, BIG)) for seed in range(3)]
        view = tensors[1][100:-100]
        tensors.clear()
        for seed in range(10, 30):
            tensor = await receiver.receive(await api.call(peers.send_pattern, seed, BIG))
            assert torch.equal(tensor, pattern(seed, BIG))
        assert torch.equal(view, pattern(1, BIG)[100:-100])


async def test_a_message_of_several_tensors_arrives_whole(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1) as (sender, engine):
        async with sender.message() as message:
            handles = [await message.send(pattern(0, BIG))]
            receiving = engine.start(peers.receive_pattern, handles[0], 0)
            handles.append(await message.send(pattern(1, 5)))
            # The engine answers, so it has read all earlier records.
            assert await engine.call(_arrived) == 2
            assert not receiving.done()
        assert await receiving
        assert await engine.call(peers.receive_pattern, handles[1], 1)
        await settled(sender)


async def _arrived(state: peers.State) -> int:
    await until(lambda: state.receiver.statistics().unclaimed_tensors == 2)
    return state.receiver.statistics().unclaimed_tensors


async def test_a_message_whose_block_fails_does_not_arrive_at_all(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1) as (sender, engine):
        with pytest.raises(ZeroDivisionError):
            async with sender.message() as message:
                handles = [await message.send(pattern(0, BIG)), await message.send(pattern(1, 5))]
                raise ZeroDivisionError
        for handle in handles:
            with pytest.raises(DiscardedError):
                await engine.call(peers.receive_pattern, handle, 0)
        await settled(sender)


async def test_receiving_a_tensor_twice_raises_already_taken_error(pairs: PairMaker) -> None:
    async with pairs.near_sender() as (sender, engine):
        handle = await sender.send(pattern(0, BIG))
        assert await engine.call(peers.receive_pattern, handle, 0)
        with pytest.raises(AlreadyTakenError):
            await engine.call(peers.receive_pattern, handle, 0)


async def test_an_error_of_send_releases_all_resources(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, engine):
        leaf = torch.ones(3, requires_grad=True)
        for wrong, error in (
            (torch.eye(3).to_sparse(), UnsupportedTensorError),
            (leaf * 2, UnsupportedTensorError),
            (pattern(0, BIG + 1), TooLargeError),
        ):
            with pytest.raises(error):
                await sender.send(wrong)
            with pytest.raises(error):
                sender.send_nowait(wrong)
            statistics = sender.statistics()
            assert (statistics.in_flight, statistics.bytes_in_use, statistics.waiting) == (0, 0, 0)
            assert await engine.call(peers.receive_pattern, await sender.send(pattern(1, BIG)), 1)
            await settled(sender)


async def test_a_hundred_messages_leave_memory_and_descriptors_as_they_were(pairs: PairMaker) -> None:
    async with pairs.near_receiver() as (receiver, api, _):

        async def one(seed: int) -> None:
            tensor = await receiver.receive(await api.call(peers.send_pattern, seed, BIG))
            assert torch.equal(tensor, pattern(seed, BIG))

        async def left() -> list[tuple[int, int]]:
            await api.call(_settled)
            return [(watch.descriptors(pid), watch.memfds(pid)) for pid in (os.getpid(), api.pid)]

        await one(0)
        before = await left()
        for seed in range(100):
            await one(seed)
        assert await left() == before
        assert receiver.statistics().leases == 0


async def _settled(state: peers.State) -> None:
    gc.collect()
    await settled(state.sender)


@pytest.mark.parametrize("mode", ["plain"], indirect=True)  # processes that are spawned take long to start
async def test_senders_in_several_processes_feed_one_receiver_in_any_order(endpoint: Endpoint) -> None:
    async with (
        peers.peers(endpoint, 3, "spawn") as children,
        TensorReceiver(endpoint) as receiver,
    ):
        for child in children:
            await child.call(peers.open_sender, 64)
        sending = [
            child.start(peers.send_pattern, seed, BIG if seed % 3 == 0 else 20)
            for seed in range(30)
            for child in children
        ]
        handles = list(reversed(await asyncio.gather(*sending)))
        assert len(set(handles)) == 90
        for handle in handles:
            tensor = await receiver.receive(handle)
            assert torch.equal(tensor, pattern(int(tensor[0]), handle.shape[0]))
        for child in children:
            await child.call(peers.drain)
        assert receiver.statistics().senders == 3


async def test_a_receiver_in_a_child_takes_from_senders_in_parent_and_child(endpoint: Endpoint) -> None:
    async with (
        peers.peers(endpoint, 2) as [engine, api],
        TensorSender(endpoint) as sender,
    ):
        await engine.call(peers.open_receiver)
        await api.call(peers.open_sender)
        async with sender.message() as message:
            ours = [await message.send(pattern(1, BIG)), await message.send(pattern(2, 7))]
        theirs = await api.call(peers.send_message, 3, [5, BIG])
        for seed, handle in ((3, theirs[0]), (2, ours[1]), (4, theirs[1]), (1, ours[0])):
            assert await engine.call(peers.receive_pattern, handle, seed)
        await settled(sender)
        await api.call(peers.drain)
