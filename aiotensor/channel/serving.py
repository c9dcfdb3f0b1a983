"""Answer requests, each in a separate task."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio

from aiotensor.channel.remote_client import IncomingRequest
from aiotensor.channel.request import Request

__all__ = ["serve"]

M = TypeVar("M")


async def serve(
    take: Callable[[], Awaitable[tuple[IncomingRequest, Request[M]] | None]],
    handler: Callable[[M], Awaitable[object]],
    max_concurrent: int | None,
    fail_unstarted: Callable[[IncomingRequest], None],
) -> None:
    """Answer each request with the result of a function, until there are no more.

    Cancelling cancels the tasks, once, and waits until they have ended.

    Args:
        take: waits for a request, and returns it; None if there are no more.
        handler: called with each message; returns the answer.
        max_concurrent: the most requests that are handled at once; None for no limit.
        fail_unstarted: called with a request whose task was cancelled, perhaps before it began.
    """
    limiter = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)
    answering: set[asyncio.Task[None]] = set()

    async def answer(request: Request[M]) -> None:
        async with request:
            await request.reply(await handler(request.message))

    def ended(taken: tuple[IncomingRequest, Request[M]], task: asyncio.Task[None]) -> None:
        answering.discard(task)
        if limiter is not None:
            limiter.release()
        if task.cancelled():
            incoming, _ = taken  # until now, or an unstarted request would count as dropped
            fail_unstarted(incoming)

    async with asyncio.TaskGroup() as group:
        try:
            while True:
                if limiter is not None:
                    await limiter.acquire()
                taken = await take()
                if taken is None:
                    break
                task = group.create_task(answer(taken[1]))
                answering.add(task)
                task.add_done_callback(partial(ended, taken))
                del taken, task  # or its tensors would live until the next one arrives
            while answering:
                await asyncio.wait(answering)
        except asyncio.CancelledError:
            for task in answering:
                task.cancel()
            # A surrounding scope of anyio would cancel this wait again in each iteration of the loop.
            with anyio.CancelScope(shield=True):
                while answering:
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait(answering)
            raise
