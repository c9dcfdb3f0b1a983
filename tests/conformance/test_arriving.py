"""Tensors arrive in another process complete and once, with their values, and stay valid."""

import gc
import itertools
import os
from collections.abc import Callable

import pytest
import torch

from aiotensor import TensorHandle
from tests.conformance.makers import PairMaker
from verification.patterns import BIG, pattern
from verification.processes import peers, watch
from verification.waiting import settled

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


@pytest.mark.promise(7, 36)
async def test_values_arrive_in_another_process_bit_for_bit(pairs: PairMaker) -> None:
    async with pairs.near_receiver() as (receiver, api, _):
        for rows, (name, make) in itertools.product((5, 5000), _VALUES.items()):
            received = await receiver.receive(await api.call(_send_values, name, rows))
            wanted = make(rows)
            assert (received.dtype, received.shape) == (wanted.dtype, wanted.shape), name
            assert received.requires_grad == wanted.requires_grad, name
            assert torch.equal(_bits(received), _bits(wanted.resolve_conj().resolve_neg())), name


async def _send_values(state: peers.State, name: str, rows: int) -> TensorHandle:
    return await state.sender.send(_VALUES[name](rows))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.promise(8)
async def test_the_senders_tensor_may_change_as_soon_as_send_has_returned(pairs: PairMaker) -> None:
    async with pairs.near_sender() as (sender, engine):
        # Each size once in fresh memory and once in warm.
        for seed, count in itertools.product((3, 4), (100, 1 << 16, BIG)):
            tensor = pattern(seed, count)
            address = tensor.data_ptr()
            handle = await sender.send(tensor)
            tensor.fill_(-1)
            assert tensor.data_ptr() == address
            assert await engine.call(peers.receive_pattern, handle, seed)
            await settled(sender)


@pytest.mark.promise(9)
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


@pytest.mark.promise(3)
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
