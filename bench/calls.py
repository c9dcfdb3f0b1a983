"""Count the calls of Python functions from `send` to delivery, and of a request with its answer.

Both sides run in this process, on uvloop, whose own functions are not written in Python. The count is the
average over many steps. It includes the callbacks of the loop, but not the functions of this module. A
coroutine that resumes counts as a call.
"""

import asyncio
import gc
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FrameType
from typing import NamedTuple

import msgspec
import torch
import uvloop

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from bench.records import Verdict

_KIB, _MIB = 1 << 10, 1 << 20
_WARM_UP, _STEPS = 50, 100

_Step = Callable[[], Awaitable[object]]


class _Message(msgspec.Struct):
    tensor: torch.Tensor


@asynccontextmanager
async def _tensors(
    folder: str, nbytes: int, *, by_handle: bool = False, allocates: bool = False
) -> AsyncIterator[_Step]:
    address = f"unix://{folder}/tensors.sock"
    source = torch.zeros(nbytes, dtype=torch.uint8)
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await sender.ready()

        async def step() -> None:
            tensor = await sender.allocate((nbytes,), torch.uint8) if allocates else source
            handle = await sender.send(tensor)
            del tensor
            await (receiver.receive(handle) if by_handle else anext(receiver))

        yield step


@asynccontextmanager
async def _requests(folder: str, nbytes: int) -> AsyncIterator[_Step]:
    address = f"unix://{folder}/engine.sock"
    message = _Message(torch.zeros(nbytes, dtype=torch.uint8))

    async def serve(server: MessageServer[_Message]) -> None:
        async for request in server:
            await request.answer(request.message)

    async with (
        MessageServer(address, _Message) as server,
        MessageClient(address, _Message) as client,
    ):
        serving = asyncio.create_task(serve(server))
        yield lambda: client.request(message)
        serving.cancel()


class Kind(NamedTuple):
    """One kind of step: its name, the maximum number of calls, and how to open both sides in a folder."""

    name: str
    most: int
    opened: Callable[[str], AbstractAsyncContextManager[_Step]]


KINDS = (
    Kind("4 KiB tensor from `send` to iteration", 39, lambda folder: _tensors(folder, 4 * _KIB)),
    Kind(
        "4 KiB tensor from `send` to `receive`", 47, lambda folder: _tensors(folder, 4 * _KIB, by_handle=True)
    ),
    Kind("64 KiB tensor, copied", 60, lambda folder: _tensors(folder, 64 * _KIB)),
    Kind("1 MiB tensor from `allocate()`", 65, lambda folder: _tensors(folder, _MIB, allocates=True)),
    Kind("4 KiB request with its answer", 60, lambda folder: _requests(folder, 4 * _KIB)),
)


def count(kind: Kind) -> float:
    """Return the calls of one step."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # `uvloop.run` adds a coroutine
        return runner.run(_count(kind))


async def _count(kind: Kind) -> float:
    calls = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename != __file__

    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        async with kind.opened(folder) as step:
            for _ in range(_WARM_UP):
                await step()
            gc.collect()
            gc.disable()  # finalizers of other objects
            sys.setprofile(profile)
            try:
                for _ in range(_STEPS):
                    await step()
            finally:
                sys.setprofile(None)
                gc.enable()
    return calls / _STEPS


def verdicts() -> list[Verdict]:
    """Count the calls of each kind of step, and compare them with the goals."""
    found = []
    for kind in KINDS:
        calls = count(kind)
        found.append(
            Verdict(
                kind.name,
                "",
                f"at most {kind.most} calls of Python functions",
                "calls",
                *(calls, calls, calls),
                met=calls <= kind.most,
            )
        )
    return found
