"""A sender and a receiver in one process, and what tests wait for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import torch

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from tests.conformance.links import LINKS
from tests.loops import let_threads_run

BIG = 100_000  # elements of int64: well above what rides in a frame


class Pair(NamedTuple):
    sender: TensorSender
    receiver: TensorReceiver


class Links:
    """Which link the running test is about; the fixture `link` of conftest.py sets it."""

    current = "queue"


@contextmanager
def endpoint(link: str | None = None) -> Iterator[Endpoint]:
    """Make a place where a sender and a receiver meet, and see that nothing of it is left in the end."""
    with LINKS[link or Links.current].place() as place:
        yield place.endpoint
        assert not place.names()


@asynccontextmanager
async def pair(
    max_concurrent_videos: int = 8, arena_bytes: int = 1 << 30, max_wait_s: float | None = None
) -> AsyncIterator[Pair]:
    with endpoint() as place:
        async with (
            TensorReceiver(place) as receiver,
            TensorSender(place, max_concurrent_videos, arena_bytes, max_wait_s=max_wait_s) as sender,
        ):
            yield Pair(sender, receiver)


def pattern(seed: int, count: int) -> torch.Tensor:
    """Make a tensor whose every element tells where it belongs."""
    return torch.arange(count, dtype=torch.int64) * 31 + seed


def beyond(handle: TensorHandle) -> TensorHandle:
    """Name a tensor of the same sender that comes later, if ever."""
    return TensorHandle(handle.sender, handle.message + 1000, 0, handle.dtype, handle.shape, handle.device)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so; the test's own limit of time ends a wait in vain."""
    while not condition():
        let_threads_run()
        await asyncio.sleep(0)


async def settled(sender: TensorSender) -> None:
    """Wait until everything that a sender held has come back."""
    await until(lambda: sender.statistics().in_flight == 0 and sender.statistics().bytes_in_use == 0)
