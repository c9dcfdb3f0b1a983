"""Arrays that torch cannot view, such as images whose colours are reversed: the worker gathers them."""

import asyncio
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import place
from tests.conformance.turns import Turns
from tests.pairs import pair
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Array = npt.NDArray[np.generic]
PACKED = np.dtype([("mark", "u1"), ("value", "<f4"), ("wide", "<c16")])


def random_bytes(count: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, count, np.uint8)


def packed(count: int) -> npt.NDArray[np.void]:
    array = np.zeros(count, PACKED)
    array["value"] = np.arange(count)
    array["wide"] = np.arange(count)
    return array


# The number of elements of each array: some are sent inline, others in shared memory.
ARRAYS: dict[str, Callable[[int], Array]] = {
    "reversed colours": lambda n: random_bytes(3 * n).reshape(-1, 3)[..., ::-1],
    "upside down": lambda n: np.arange(2 * n, dtype=np.float64).reshape(-1, 2)[::-1],
    "a packed field": lambda n: packed(n)["value"],
    "a packed field of 16 bytes": lambda n: packed(n)["wide"],
    "a packed field reversed": lambda n: packed(n)["value"][::-2],
    "misaligned": lambda n: np.frombuffer(random_bytes(2 * n + 1), np.uint16, offset=1),
    "misaligned and strided": lambda n: np.frombuffer(random_bytes(4 * n + 1), np.uint16, offset=1)[::2],
    "misaligned and reversed": lambda n: np.frombuffer(random_bytes(4 * n + 1), np.uint32, offset=1)[::-1],
    "empty": lambda n: np.zeros((0, n))[:, ::-1],
    "without dimensions": lambda n: packed(n)["value"][n // 2 :][:1].reshape(()),
    "read-only": lambda n: np.frombuffer(random_bytes(n).tobytes(), np.uint8)[::-1],
}
COUNTS = [7, 100_000]


def assert_same(received: torch.Tensor, array: Array) -> None:
    found = received.numpy()
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("count", COUNTS)
async def test_arrays_that_torch_cannot_view_arrive_unchanged(count: int) -> None:
    async with pair() as (sender, receiver):
        for make in ARRAYS.values():
            array = make(count)
            assert_same(await receiver.receive(await sender.send(array)), array)
            assert_same(await receiver.receive(sender.send_nowait(array)), array)
            async with sender.message() as message:
                handles = [await message.send(array), await message.send(array)]
            for handle in handles:
                assert_same(await receiver.receive(handle), array)


async def test_arrays_that_torch_cannot_view_travel_in_messages() -> None:
    arrays = {f"{name}, {count}": make(count) for name, make in ARRAYS.items() for count in COUNTS}
    with place() as here:
        async with (
            MessageServer(here, dict[str, np.ndarray]) as server,
            MessageClient(here, dict[str, np.ndarray]) as client,
        ):
            asking = asyncio.create_task(client.request(arrays))
            async with await anext(server) as request:
                taken = request.message
                await request.answer(arrays)
            answer = await asking
    for found in (taken, answer):
        for name, array in arrays.items():
            assert found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes(), name


async def test_a_reversed_array_is_read_after_its_permit_was_granted() -> None:
    array = np.zeros((1000, 100, 3), np.uint8)
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        first = await sender.send(torch.ones(1))
        sending = asyncio.create_task(sender.send(array[..., ::-1]))
        await until(lambda: sender.statistics().waiting == 1)
        assert sender.statistics().bytes_in_use == 0
        array[:] = (1, 2, 3)  # until `send` returns it is only read when there is a place to copy it to
        await receiver.receive(first)
        received = await receiver.receive(await sending)
        assert received[7, 7].tolist() == [3, 2, 1]


@pytest.mark.promise(19)
async def test_sending_an_array_that_torch_cannot_view_leaves_the_loop_free() -> None:
    array = ARRAYS["reversed colours"](8_000_000)
    began = time.thread_time()
    array.copy()
    copying_s = time.thread_time() - began
    async with pair() as (sender, receiver):
        longest = []
        for _ in range(3):
            with Turns() as turns:
                handle = await sender.send(array)
            longest.append(turns.longest_s)
            receiver.discard(handle)
        assert min(longest) < copying_s / 4
