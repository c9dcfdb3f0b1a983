"""Batches of requests, for engines that process several messages at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.channel.request import Request, enter_batch, fail_batch, has_ended, leave_batch
from aiotensor.channel.requests import Requests
from aiotensor.runtime import tracing
from aiotensor.runtime.arguments import count, seconds

M = TypeVar("M")


class Batches(Generic[M]):
    """Iterate over the requests of a server in batches; created by `MessageServer.batches`.

    A request waits in the server until its batch is complete. Until then its client keeps its permit, and a
    cancelled request leaves the batch.

    Args:
        requests: the requests of the server.
        max_batch: the maximum number of requests in a batch.
        batch_wait_s: the time in seconds for which the first request of a batch may wait for others.
    """

    def __init__(self, requests: Requests[M], max_batch: int, batch_wait_s: float) -> None:
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
        requests = self._requests
        while not requests.affinity.is_closed:
            if not self._taken:
                await self._fill()
            await self._take_ready()
            # Decoding a message may have taken long enough for others to be cancelled.
            batch = [request for request in self._taken if not has_ended(request)]
            self._taken.clear()
            if batch:
                return batch
        raise StopAsyncIteration

    async def _take_ready(self) -> None:
        """Take the requests that are ready, up to a full batch."""
        requests = self._requests
        while len(self._taken) < self._max_batch and not requests.affinity.is_closed:
            taken = await requests.take(waits=False)
            if taken is None:
                break
            self._taken.append(Request(*taken, requests))

    async def _fill(self) -> None:
        """Wait for the first request, and then for a full batch, at most for the given time."""
        requests = self._requests
        while not requests.ready.by_client and not requests.affinity.is_closed:
            await requests.waiters.wait()
        timeout = asyncio.timeout(self._wait_s)
        try:
            async with timeout:
                while 0 < len(requests.ready) < self._max_batch and not requests.affinity.is_closed:
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
    with _BatchBlock(len(batch)) as block:
        for request in batch:
            enter_batch(request, block)
        try:
            with traced_batch([request.trace_context for request in batch]):
                answers = handler([request.message for request in batch])
                if not hasattr(answers, "__await__"):
                    raise not_awaitable(answers)
                results = checked_results(await answers, len(batch))
        except BaseException as error:
            fail_batch(batch, error)
            if not isinstance(error, Exception):
                raise
        finally:
            for request in batch:
                leave_batch(request)
    if results:
        async with asyncio.TaskGroup() as answering:  # a client that does not read delays only its answer
            for request, result in zip(batch, results, strict=True):
                answering.create_task(_answer(request, result))


@contextmanager
def traced_batch(contexts: Sequence[Mapping[str, str] | None]) -> Iterator[None]:
    """Trace the work on a batch of requests, with their trace contexts, if tracing is enabled."""
    span = None if (tracer := tracing.tracer) is None else tracer.answer_batch(contexts)
    try:
        yield
    except BaseException as error:
        if span is not None:
            span.end(error)
        raise
    if span is not None:
        span.end()


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


async def _answer(request: Request[Any], result: object) -> None:
    async with request:
        if isinstance(result, Exception):
            await request.fail(result)
        else:
            await request.answer(result)
