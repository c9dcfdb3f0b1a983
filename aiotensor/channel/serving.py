"""Answer requests, each in a separate task."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio

from aiotensor.channel.request import Request

__all__ = ["serve"]

M = TypeVar("M")


async def serve(
    requests: AsyncIterator[Request[M]],
    handler: Callable[[M], Awaitable[object]],
    turns: asyncio.Semaphore | None,
) -> None:
    """Answer each request with the result of a function, until there are no more.

    Cancelling cancels the tasks, once, and waits until they have ended.

    Args:
        requests: yields the requests.
        handler: called with each message; returns the answer.
        turns: limits the requests that are handled at once; None for no limit.
    """
    answering: set[asyncio.Task[None]] = set()

    async def answer(request: Request[M]) -> None:
        async with request:
            await request.reply(await handler(request.message))

    def ended(request: Request[M], task: asyncio.Task[None]) -> None:
        answering.discard(task)
        if turns is not None:
            turns.release()
        if task.cancelled():
            request._never_begun()

    async with asyncio.TaskGroup() as group:
        try:
            while True:
                if turns is not None:
                    await turns.acquire()
                request = await anext(requests, None)
                if request is None:
                    break
                task = group.create_task(answer(request))
                answering.add(task)
                task.add_done_callback(partial(ended, request))
                del request, task  # or its tensors would live until the next one arrives
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
