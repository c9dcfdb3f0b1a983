"""Batches of requests, for engines that process several messages at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.channel.incoming_requests import IncomingRequests
from aiotensor.channel.request import Request, enter_batch, fail_batch, has_ended, leave_batch
from aiotensor.runtime import tracing
from aiotensor.runtime.arguments import count, seconds

__all__ = ["Batches", "answer_batch", "checked_results", "not_awaitable"]

M = TypeVar("M")


class Batches(Generic[M]):
    """Iterate over the requests of a server in batches; created by `MessageServer.batches`.

    A request waits in the server until its batch is complete. Until then its sender keeps its permit, and a
    cancelled request leaves the batch.

    Args:
        take: takes a request that is ready; returns None if there is none.
        requests: returns the requests of the server.
        max_batch: the maximum number of requests in a batch.
        batch_wait_s: the time in seconds for which the first request of a batch may wait for others.
    """

    def __init__(
        self,
        take: Callable[[], Awaitable[Request[M] | None]],
        requests: Callable[[], IncomingRequests[Any] | None],
        max_batch: int,
        batch_wait_s: float,
    ) -> None:
        self._take = take
        self._requests = requests
        self._max_batch = count("max_batch", max_batch)
        self._wait_s = seconds("batch_wait_s", batch_wait_s)
        self._taken: list[Request[M]] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Request[M]]:
        """Return the next batch, with at least one request.

        The iteration ends when the server is closed. Cancellation loses no request: the requests that were
        taken already belong to the next batch of this iterator.
        """
        while (requests := self._requests()) is not None:
            if not self._taken:
                await self._fill(requests)
            while len(self._taken) < self._max_batch and self._requests() is not None:
                request = await self._take()
                if request is None:
                    break
                self._taken.append(request)
            # Decoding a message may have taken long enough for others to be cancelled.
            batch = [request for request in self._taken if not has_ended(request)]
            self._taken.clear()
            if batch:
                return batch
        raise StopAsyncIteration

    async def _fill(self, requests: IncomingRequests[Any]) -> None:
        """Wait for the first request, and then for a full batch, at most for the given time."""
        while not len(requests.ready) and self._requests() is not None:
            await requests.waiters.wait()
        timeout = asyncio.timeout(self._wait_s)
        try:
            async with timeout:
                while 0 < len(requests.ready) < self._max_batch and self._requests() is not None:
                    await requests.waiters.wait()
        except TimeoutError:
            if not timeout.expired():
                raise


class _BatchBlock(CancelOnce):
    """Cancel the task that handles a batch once no request of the batch is wanted."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self._wanted = requests

    def cancel(self) -> None:
        """Count a request that is no longer wanted."""
        self._wanted -= 1
        if not self._wanted:
            super().cancel()


async def answer_batch(
    handler: Callable[[list[M]], Awaitable[Sequence[object]]], batch: list[Request[M]]
) -> None:
    """Call a handler with the messages of a batch, and answer each request with its result."""
    results: Sequence[object] = ()
    span: tracing.Span | None = None
    if (tracer := tracing.tracer) is not None:
        span = tracer.answer_batch([request.trace_context for request in batch])
    with _BatchBlock(len(batch)) as block:
        for request in batch:
            enter_batch(request, block)
        try:
            answers = handler([request.message for request in batch])
            if not hasattr(answers, "__await__"):
                raise not_awaitable(answers)
            results = checked_results(await answers, len(batch))
            if span is not None:
                span.end()
        except BaseException as error:
            if span is not None:
                span.end(error)
            fail_batch(batch, error)
            if not isinstance(error, Exception):
                raise
        finally:
            for request in batch:
                leave_batch(request)
    if results:
        async with asyncio.TaskGroup() as replying:  # a client that does not read delays only its own reply
            for request, result in zip(batch, results, strict=True):
                replying.create_task(_reply(request, result))


def not_awaitable(answer: object) -> TypeError:
    """Return the error of a handler that is not a coroutine function."""
    return TypeError(
        f"the handler returned {type(answer).__name__!r} in place of a coroutine: "
        "define it with `async def`, or use an aiotensor.blocking.MessageServer"
    )


def checked_results(results: Sequence[object], count: int) -> Sequence[object]:
    """Return the results of a handler, if there is one for each request of its batch.

    Raises:
        TypeError: the handler returned something else than a sequence.
        ValueError: their number differs.
    """
    if not isinstance(results, Sequence):
        raise TypeError(f"the handler must return a list of {count} results, got {type(results).__name__!r}")
    if len(results) != count:
        raise ValueError(f"the handler returned {len(results)} results for a batch of {count} messages")
    return results


async def _reply(request: Request[Any], result: object) -> None:
    async with request:
        if isinstance(result, Exception):
            await request.fail(result)
        else:
            await request.reply(result)
