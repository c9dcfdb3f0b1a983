"""The receiver takes every tensor that a sender accepted: honest senders break no protocol."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from aiotensor.memory.tensors import DTYPES
from aiotensor.protocol.frames import MAX_DIMENSIONS
from tests.pairs import Pair, pair
from tests.selection import COMPLETE
from verification.waiting import settled

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

NUMPY_DTYPES = [np.uint8, np.int16, np.float16, np.float32, np.int64, np.float64, np.complex64, np.complex128]


WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values in row-major order, using integers only."""
    plain = tensor.detach()
    plain = plain.conj() if plain.is_conj() else plain
    if plain.dtype is torch.complex128:
        plain = torch.view_as_real(plain)
    raw = plain.view(WHOLE[plain.element_size()]).contiguous()
    array = raw.as_strided((raw.numel(),), (1,)).numpy()
    if tensor.is_conj():
        parts = array.view(f"u{tensor.element_size() // 2}")[1::2]
        parts ^= parts.dtype.type(1 << (8 * parts.itemsize - 1))
    return array.tobytes()


async def test_a_view_across_two_allocated_blocks_is_copied() -> None:
    async with pair(arena_bytes=1 << 20) as (sender, receiver):
        first = await sender.allocate((65_536,), torch.uint8)
        second = await sender.allocate((65_536,), torch.uint8)
        low = min((first, second), key=torch.Tensor.data_ptr)
        assert abs(first.data_ptr() - second.data_ptr()) == 65_536
        first[:], second[:] = 1, 2
        both = np.lib.stride_tricks.as_strided(low.numpy(), (131_072,), (1,))
        received = await receiver.receive(await sender.send(both))
        assert received.numpy().tobytes() == both.tobytes()
        assert sender.statistics().tensors_copied == 1


def random_view(allocated: torch.Tensor, draw: random.Random) -> torch.Tensor | np.ndarray:
    """Return a view of a part of the memory, of a kind that torch or numpy allows."""
    memory = allocated.numpy()
    if draw.random() < 0.5:
        kind = np.dtype(draw.choice(NUMPY_DTYPES))
        start = draw.randrange(64)
        count = draw.choice([0, 1, 3, 700, 3000])
        view = np.frombuffer(memory, kind, offset=start, count=count)
        if draw.random() < 0.3:
            view = view[:: draw.choice([-2, -1, 2])]
        if draw.random() < 0.2:
            view = np.lib.stride_tricks.as_strided(view[:1], (40, 90), (0, 0)) if len(view) else view
        if draw.random() < 0.3:
            view = view.reshape((1,) * draw.randrange(5) + view.shape)
        return view
    dtype = draw.choice(list(DTYPES.values()))
    if dtype is torch.bool:
        return (allocated & 1).view(torch.bool)[draw.randrange(9) :]
    step = dtype.itemsize
    start = draw.randrange(4) * step
    count = draw.choice([0, 1, 6, 600, 6000]) * step
    tensor = allocated[start : start + count].view(dtype)
    if draw.random() < 0.5 and count:
        tensor = tensor.reshape(-1, 2, 3) if not tensor.numel() % 6 else tensor.reshape(1, -1)
        tensor = tensor.transpose(0, tensor.dim() - 1)
    if dtype.is_complex and draw.random() < 0.4:
        tensor = tensor.conj()
    if draw.random() < 0.2:
        tensor = tensor.reshape((1,) * (MAX_DIMENSIONS - tensor.dim()) + tensor.shape)
    if draw.random() < 0.2:
        tensor = tensor.unsqueeze(0).expand(draw.randrange(3), *tensor.shape) if tensor.dim() < 64 else tensor
    if draw.random() < 0.3:
        wants = (dtype.is_floating_point or dtype.is_complex) and draw.random() < 0.5
        tensor = torch.nn.Parameter(tensor, requires_grad=wants)
    elif dtype.is_floating_point and draw.random() < 0.3:
        tensor = tensor.detach().requires_grad_()
    return tensor


@pytest.mark.promise(27)
async def test_every_view_that_a_sender_accepts_can_be_received(moments: random.Random) -> None:
    async with pair() as here:
        for _ in range(1000 if COMPLETE else 150):
            is_allocated = moments.random() < 0.7
            nbytes = 128 * 1024
            memory = (
                await here.sender.allocate((nbytes,), torch.uint8)
                if is_allocated
                else torch.zeros(nbytes, dtype=torch.uint8)
            )
            memory.copy_(torch.frombuffer(bytearray(moments.randbytes(nbytes)), dtype=torch.uint8))
            await assert_taken(here, random_view(memory, moments), moments)
            del memory
        assert here.receiver.statistics().senders_lost == 0
        await settled(here.sender)


async def assert_taken(here: Pair, view: torch.Tensor | np.ndarray, draw: random.Random) -> None:
    sent = view if isinstance(view, torch.Tensor) else torch.from_numpy(view.copy())
    way = draw.choice(["send", "send_nowait", "message"])
    if way == "send":
        handle = await here.sender.send(view)
    elif way == "send_nowait":
        handle = here.sender.send_nowait(view)
    else:
        async with here.sender.message() as message:
            handle = await message.send(view)
    received = await here.receiver.receive(handle)
    assert (received.dtype, received.shape, type(received)) == (sent.dtype, sent.shape, type(sent))
    assert received.requires_grad == sent.requires_grad
    assert bits_of(received) == bits_of(sent)


EXTREMES: dict[str, Callable[[], torch.Tensor]] = {
    "64 dimensions": lambda: torch.ones([1] * 64),
    "64 dimensions, none of one element": lambda: torch.ones([1]).expand([1] * 50 + [2] * 14),
    "64 dimensions of no elements": lambda: torch.ones([2**20, 0] + [1] * 62),
    "no elements, of a huge size": lambda: torch.empty((0, 2**59), dtype=torch.float64),
    "no elements, of huge strides": lambda: torch.empty(0).as_strided((0, 2), (2**60, 2**60)),
    "one element, of huge strides": lambda: torch.ones(1).as_strided((1, 1), (2**60, 2**60)),
    "no elements, beyond its storage": lambda: torch.empty(4)[4:],
    "a parameter of whole numbers": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "a parameter of bits": lambda: torch.nn.Parameter(
        torch.arange(3, dtype=torch.uint8).view(torch.bits8), requires_grad=False
    ),
    "a parameter of no elements": lambda: torch.nn.Parameter(torch.empty(0, 3)),
    "a leaf of float8": lambda: torch.zeros(5).to(torch.float8_e5m2).requires_grad_(),
    "a tensor of inference": lambda: made_in_inference(),
}


def made_in_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(6.0).reshape(2, 3).t()


@pytest.mark.promise(27)
async def test_extreme_tensors_that_a_sender_accepts_can_be_received() -> None:
    async with pair() as (sender, receiver):
        for name, make in EXTREMES.items():
            sent = make()
            received = await receiver.receive(await sender.send(sent))
            assert (received.dtype, received.shape, type(received)) == (sent.dtype, sent.shape, type(sent)), (
                name
            )
            assert received.requires_grad == sent.requires_grad, name
            assert bits_of(received) == bits_of(sent), name
