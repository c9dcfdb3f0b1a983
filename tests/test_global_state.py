"""The global state of torch, such as its default device and modes, does not affect transfers."""

import asyncio
import itertools
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager

import numpy as np
import pytest
import torch

from aiotensor.codec import TensorDecoder, TensorEncoder
from tests.pairs import Pair, pair
from tests.selection import COMPLETE

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

# A program for a separate process, where torch has unusual defaults.
TRIP = """
import asyncio, tempfile
import numpy as np
import torch
BEFORE
import aiotensor, aiotensor.channel, aiotensor.blocking
from aiotensor import TensorReceiver, TensorSender
from aiotensor.codec import TensorDecoder, TensorEncoder
AFTER


def check(tensor, expected):
    assert (tensor.device.type, tensor.dtype) == ("cpu", expected.dtype), (tensor.device, tensor.dtype)
    assert tensor.shape == expected.shape
    assert tensor.numpy().tobytes() == expected.numpy().tobytes()


def sources():
    for shape in (), (3,), (0, 3), (50, 3), (500, 100), (500, 100, 3):
        numbers = np.random.default_rng(0).integers(0, 256, (*shape, 4), np.uint8)
        whole = torch.from_numpy(numbers.view(np.float32)[..., 0].copy())
        yield whole, whole
        yield whole.T if len(shape) == 2 else whole, whole.T if len(shape) == 2 else whole
        turned = numbers[::-1] if shape else numbers
        yield turned, torch.from_numpy(turned.copy())
    half = torch.from_numpy(np.arange(9, dtype=np.int16)).view(torch.bfloat16)
    yield half, half.view(torch.int16)


async def main(folder):
    address = f"unix://{folder}/s"
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        for source, expected in sources():
            for copy in (False, True):
                received = await receiver.receive(await sender.send(source), copy=copy)
                check(received.view(expected.dtype), expected)
            received = receiver.receive_nowait(await sent(receiver, sender.send_nowait(source)))
            check(received.view(expected.dtype), expected)
            parts = TensorEncoder(inline_bytes=100).encode([source])
            [received] = TensorDecoder(list[torch.Tensor]).decode(parts)
            check(received.view(expected.dtype), expected)
        for shape in (0, 3), (5,), (100, 1000):
            allocated = await sender.allocate(shape, torch.bfloat16)
            assert (allocated.device.type, allocated.dtype) == ("cpu", torch.bfloat16)


async def sent(receiver, handle):
    await receiver.arrived(handle)
    return handle


with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
    asyncio.run(main(folder))
"""
DEFAULTS = 'torch.set_default_device("meta"); torch.set_default_dtype(torch.float64)'


@pytest.mark.promise(32)
@pytest.mark.parametrize("moment", ["BEFORE", "AFTER"] if COMPLETE else ["BEFORE"])
def test_a_default_device_set_before_or_after_the_import_makes_no_difference(moment: str) -> None:
    program = textwrap.dedent(TRIP).replace(moment, DEFAULTS)
    program = program.replace("BEFORE", "").replace("AFTER", "")
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]


@asynccontextmanager
async def other_task_in(mode: str) -> AsyncIterator[None]:
    """Let another task wait inside a mode of torch, which then applies to all tasks of this thread."""
    inside, leave = asyncio.Event(), asyncio.Event()

    async def infer() -> None:
        with MODES[mode]():
            inside.set()
            await leave.wait()

    task = asyncio.create_task(infer())
    await inside.wait()
    assert torch.is_inference_mode_enabled() == (mode == "inference_mode")
    assert not torch.is_grad_enabled()
    try:
        yield
    finally:
        leave.set()
        await task
        assert torch.is_grad_enabled()


def assert_usual(tensor: torch.Tensor) -> None:
    """Check that a tensor can be written in place, and take part in autograd, as any other."""
    assert not tensor.is_inference()
    plain = tensor.detach()
    if plain.dtype is not torch.float8_e4m3fn:
        weight = torch.ones((), dtype=tensor.dtype, requires_grad=True)
        torch.autograd.backward((plain * weight).abs().sum())
        assert weight.grad is not None
        if not tensor.requires_grad:
            tensor.zero_()
            tensor.mul_(weight)
            assert tensor.requires_grad
    else:
        plain.view(torch.uint8).zero_()


WAYS: dict[str, Callable[[Pair, torch.Tensor], Awaitable[torch.Tensor]]] = {
    "received": lambda here, sent: received(here, sent, copy=False),
    "copied": lambda here, sent: received(here, sent, copy=True),
    "allocated": lambda here, sent: here.sender.allocate(sent.shape, sent.dtype),
    "decoded": lambda here, sent: decoded(sent),
}


async def received(here: Pair, sent: torch.Tensor, *, copy: bool) -> torch.Tensor:
    return await here.receiver.receive(await here.sender.send(sent), copy=copy)


async def decoded(sent: torch.Tensor) -> torch.Tensor:
    [found] = TensorDecoder(list[torch.Tensor]).decode(TensorEncoder().encode([sent]))
    return found


@pytest.mark.promise(32)
@pytest.mark.parametrize("mode", MODES)
async def test_tensors_created_while_another_task_is_in_a_torch_mode_are_normal(mode: str) -> None:
    async with pair() as here:
        for way, dtype, shape in itertools.product(WAYS.values(), DTYPES, [(), (0, 3), (300, 70)]):
            sent = torch.zeros(shape).to(dtype)
            async with other_task_in(mode):
                tensor = await way(here, sent)
            assert_usual(tensor)
    body = TensorEncoder().encode([np.ones(3, np.float32)])
    async with other_task_in(mode):
        [tensor] = TensorDecoder(list[torch.Tensor]).decode(body)
    assert_usual(tensor)
