"""Handle the requests of a server in tasks, and limit their number."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import anyio

from aiotensor.channel.request import Request, fail_unstarted
from aiotensor.runtime.waiting import Waiters

__all__ = ["serve"]

M = TypeVar("M")


class _Slots:
    """Count the requests that may still begin; one task acquires.

    Args:
        limit: the maximum number of requests at once; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._free = limit
        self._waiters = Waiters()

    async def acquire(self, count: int) -> None:
        if self._free is not None:
            while self._free < count:
                await self._waiters.wait()
            self._free -= count

    def release(self, count: int) -> None:
        if self._free is not None:
            self._free += count
            self._waiters.wake()


async def serve(
    take: Callable[[], Awaitable[list[Request[M]]]],
    answer: Callable[[list[Request[M]]], Coroutine[Any, Any, None]],
    largest: int,
    max_concurrent: int | None,
) -> None:
    """Answer requests in tasks until the server is closed and all tasks have ended.

    Cancellation cancels the tasks, once, and waits until they have ended.

    Args:
        take: waits for the next requests, which one task answers; returns an empty list once the server is
            closed.
        answer: answers these requests.
        largest: the maximum number of requests that `take` returns.
        max_concurrent: the maximum number of requests at once, at least `largest`; None for no limit.
    """
    slots = _Slots(max_concurrent)
    answering: set[asyncio.Task[None]] = set()

    def ended(batch: list[Request[M]], task: asyncio.Task[None]) -> None:
        answering.discard(task)
        slots.release(len(batch))
        if task.cancelled():
            for request in batch:  # `ended` kept them alive: otherwise they would count as dropped
                fail_unstarted(request)

    async with asyncio.TaskGroup() as group:
        try:
            while True:
                await slots.acquire(largest)
                batch = await take()
                if not batch:
                    break
                slots.release(largest - len(batch))
                task = group.create_task(answer(batch))
                answering.add(task)
                task.add_done_callback(partial(ended, batch))
                del batch, task  # otherwise, the tensors would live until the next request arrives
            while answering:
                await asyncio.wait(answering)
        except asyncio.CancelledError:
            # Not in a loop: before Python 3.13, the error and its traceback refer to each other, so a
            # variable of this frame would keep the last task, with its request.
            list(map(asyncio.Task.cancel, answering))
            # A surrounding scope of anyio would cancel this wait again in each iteration of the loop.
            with anyio.CancelScope(shield=True):
                while answering:
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait(answering)
            raise
