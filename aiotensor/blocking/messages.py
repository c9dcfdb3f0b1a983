"""Blocking clients and servers of messages, and the requests that a server receives."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

from aiotensor import channel
from aiotensor.blocking.portal import Block, BlockingObject, UntilClosed, parameters_of
from aiotensor.channel.cancelling import CancelOnce
from aiotensor.channel.server import checked_results, fail_batch
from aiotensor.errors import ClosedError
from aiotensor.runtime import tracing
from aiotensor.types import ClientStatistics, ServerStatistics

M = TypeVar("M")
R = TypeVar("R")


class MessageClient(BlockingObject[channel.MessageClient[R], ClientStatistics], Generic[R]):
    """Send messages with tensors to servers; open it with ``with``, and share it between threads.

    Arguments and errors are those of `aiotensor.MessageClient`.
    """

    @parameters_of(channel.MessageClient[R])
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(channel.MessageClient(*args, **kwargs))

    def permit(self, *, timeout: float | None = None) -> "Permit":
        """Return a permit for one request: ``with client.permit() as permit``.

        Entering the permit waits for it, at most `timeout` seconds.
        """
        return Permit(self, self.call(self.inner.permit), timeout)

    def ready(self, *, nbytes: int | None = None, timeout: float | None = None) -> None:
        """Wait until a server has admitted this client, or until a request can be sent without waiting."""
        self.wait_for(self.inner.ready, nbytes=nbytes, timeout=timeout)

    def request(
        self,
        message: object,
        *,
        target: int | None = None,
        inside: "Permit | None" = None,
        idempotent: bool = False,
        timeout: float | None = None,
    ) -> R:
        """Send a message, and return the answer to it.

        Arguments, waiting and errors are those of `aiotensor.MessageClient.request`. A timeout cancels the
        request.
        """
        options = {"target": target, "inside": inside and inside.inner, "idempotent": idempotent}
        return self.wait_for(self.inner.request, message, timeout=timeout, **options)

    def send(
        self,
        message: object,
        *,
        target: int | None = None,
        inside: "Permit | None" = None,
        timeout: float | None = None,
    ) -> None:
        """Send a message without requesting an answer.

        Arguments, waiting and errors are those of `request`, except for the answer. After a timeout, the
        message is discarded unless it was sent.
        """
        block = inside and inside.inner
        self.wait_for(self.inner.send, message, target=target, inside=block, timeout=timeout)


class Permit(Block[channel.Permit]):
    """A permit for one request, made by `MessageClient.permit`.

    Use it as ``with client.permit() as permit``; waiting and errors are those of `aiotensor.Permit`.
    """


class Request(Generic[M]):
    """A message of a client, to be answered once.

    It is used like an `aiotensor.Request`, but its thread cannot be cancelled: long work should check
    `is_wanted` repeatedly. Use it as ``with request: request.answer(work(request.message))``. An `Exception`
    in the block is sent to the client and logged; `SystemExit` and `KeyboardInterrupt` propagate, and the
    client gets `PeerLostError`. After the block, the message and its tensors are released.
    """

    def __init__(self, server: "MessageServer[M]", inner: channel.Request[M]) -> None:
        self._server = server
        self.inner = inner

    def __repr__(self) -> str:
        return f"<aiotensor.blocking.{repr(self.inner)[1:]}"

    @property
    def message(self) -> M:
        """The message of the client, with its tensors in place."""
        return self.inner.message

    @property
    def client_pid(self) -> int:
        """The process id of the client, as the client reports it."""
        return self.inner.client_pid

    @property
    def is_wanted(self) -> bool:
        """Whether the client still waits for an answer."""
        return self.inner.is_wanted

    @property
    def trace_context(self) -> Mapping[str, str] | None:
        """The trace context of the client; None unless tracing is enabled in both processes."""
        return self.inner.trace_context

    def answer(self, answer: object, *, timeout: float | None = None) -> bool:
        """Send the answer, and return whether the client still waited for it.

        Waits as `aiotensor.Request.answer` does, but returns False when the client disconnects. After a
        timeout, the message can be answered again, unless the answer was sent.
        """
        return self._server.wait_for(self._answer, answer, timeout=timeout)

    async def _answer(self, answer: object) -> bool:
        # A thread has no task that the end of the client could cancel. Without this block, an answer that no
        # client waits for might wait for memory forever.
        with CancelOnce() as self.inner._incoming.block:
            return await self.inner.answer(answer)
        if self._server.is_closed:
            raise ClosedError("this MessageServer was closed")
        return False

    def fail(self, error: BaseException | str) -> bool:
        """Answer with an error, and return whether the client still waited for an answer."""
        return self._server.wait_for(self.inner.fail, error)

    def __enter__(self) -> Self:
        self.inner._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._server.inner.affinity.is_left_in_child(error):
            return False
        self.inner._end_span(error)
        self._server.call_or_do(self.inner._leave, error)
        return isinstance(error, Exception)


class MessageServer(BlockingObject[channel.MessageServer[M], ServerStatistics], Generic[M]):
    """Receive messages with tensors, and answer them in any order.

    Open it with ``with``, and iterate over it in any number of threads. Arguments and errors are those of
    `aiotensor.MessageServer`.
    """

    @parameters_of(channel.MessageServer[M])
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(channel.MessageServer(*args, **kwargs))

    @property
    def address(self) -> str:
        """The address to which clients connect, with the actual port if 0 was given."""
        return self.inner.address

    def __iter__(self) -> Iterator[Request[M]]:
        """Iterate over the requests, until this server is closed."""
        return UntilClosed(self.next)

    def next(self, *, timeout: float | None = None) -> Request[M]:
        """Return the next request.

        After a timeout, no request is lost. With a timeout of 0, the call does not wait for a request.

        Raises:
            TimeoutError: no request arrived within `timeout` seconds.
            ClosedError: this server was closed.
        """
        return self.take(None, self._take, timeout)

    def arrived(self, *, timeout: float | None = None) -> None:
        """Wait until a request has arrived, without taking it."""
        self.wait_for(self.inner.arrived, timeout=timeout)

    async def _take(self, timeout: float | None) -> Request[M]:
        """Wait for a request until the timeout; decoding a request that has arrived may take longer."""
        try:
            async with asyncio.timeout(timeout):
                return Request(self, await self._next(self.inner))
        except TimeoutError:
            request = await self.inner._take(waits=False)
            if request is None:
                self.inner.affinity.check()
                raise
            return Request(self, request)

    def batches(self, max_batch: int, *, batch_wait_s: float = 0.0) -> Iterator[list[Request[M]]]:
        """Iterate over batches of requests, until this server is closed.

        Arguments and errors are those of `aiotensor.MessageServer.batches`.
        """
        batches = self.inner.batches(max_batch, batch_wait_s=batch_wait_s)

        async def next_batch() -> list[Request[M]]:
            return [Request(self, request) for request in await self._next(batches)]

        return UntilClosed(lambda: self.take(batches, next_batch))

    @overload
    def serve(self, handler: Callable[[M], object]) -> None: ...

    @overload
    def serve(
        self, handler: Callable[[list[M]], Sequence[object]], *, max_batch: int, batch_wait_s: float = 0.0
    ) -> None: ...

    def serve(
        self,
        handler: Callable[[Any], Any],
        *,
        max_batch: int | None = None,
        batch_wait_s: float = 0.0,
    ) -> None:
        """Answer every message with the result of a function, called in this thread.

        Returns when this server is closed. An `Exception` in the function reaches the client as
        `RemoteError`, and is logged. Other exceptions, such as `SystemExit`, propagate, and the client gets
        `PeerLostError`.

        With `max_batch`, the function is called with a list of messages, and returns a sequence with a result
        for each of them; see `aiotensor.MessageServer.serve`.

        Args:
            handler: called with each message, or with each list of messages; returns the answer, or a
                sequence of answers.
            max_batch: the maximum number of messages in a batch; None for single messages.
            batch_wait_s: the time in seconds for which the first message of a batch may wait for others.
        """
        if inspect.iscoroutinefunction(handler):
            raise TypeError(
                f"the handler {handler!r:.64} is a coroutine function: use an aiotensor.MessageServer"
            )
        if max_batch is None:
            for request in self:
                with request:
                    request.answer(handler(request.message))
        else:
            for batch in self.batches(max_batch, batch_wait_s=batch_wait_s):
                self._answer_batch(handler, batch)

    def _answer_batch(self, handler: Callable[[list[M]], Sequence[object]], batch: list[Request[M]]) -> None:
        try:
            with tracing.TracedBatch([request.trace_context for request in batch]):
                results = checked_results(handler([request.message for request in batch]), len(batch))
        except BaseException as error:
            self.call_or_do(fail_batch, [request.inner for request in batch], error)
            if not isinstance(error, Exception):
                raise
            return
        for request, result in zip(batch, results, strict=True):
            with request:
                if isinstance(result, Exception):
                    request.fail(result)
                else:
                    request.answer(result)
