"""Blocking requests, which a blocking server receives and answers."""

from collections.abc import Mapping
from types import TracebackType
from typing import Generic, Self, TypeVar

from aiotensor import channel
from aiotensor.blocking.portal import BlockingObject
from aiotensor.channel.request import leave, reply_while_wanted
from aiotensor.errors import ClosedError, UsageError
from aiotensor.runtime import tracing
from aiotensor.types import ServerStatistics

__all__ = ["Request"]

M = TypeVar("M")


class Request(Generic[M]):
    """A message of a client, to be answered once.

    It is used like an `aiotensor.channel.Request`, but its thread cannot be cancelled: long work should check
    `is_wanted` repeatedly. Use it as ``with request: request.reply(work(request.message))``. An `Exception`
    in the block is sent to the client and logged; `SystemExit` and `KeyboardInterrupt` propagate, and the
    client gets `PeerLostError`. After the block, the message and its tensors are released.
    """

    def __init__(
        self, server: BlockingObject[channel.MessageServer[M], ServerStatistics], inner: channel.Request[M]
    ) -> None:
        self._server = server
        self.inner = inner
        self._is_entered = False
        self._span: tracing.Span | None = None  # of the block
        self._failure: BaseException | None = None  # the error of `fail`, for the span

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

    def reply(self, answer: object, *, timeout: float | None = None) -> bool:
        """Answer the message, and return whether the client still waited for the answer.

        Waits as `aiotensor.channel.Request.reply` does, but returns False when the client disconnects. After
        a timeout, the message can be answered again, unless the answer was sent.
        """
        return self._server.wait_for(self._reply, answer, timeout=timeout)

    async def _reply(self, answer: object) -> bool:
        was_wanted = await reply_while_wanted(self.inner, answer)
        if not was_wanted and self._server.is_closed:
            raise ClosedError("this MessageServer was closed")
        return was_wanted

    def fail(self, error: BaseException | str) -> bool:
        """Answer the message with an error, and return whether the client still waited for an answer."""
        was_wanted = self._server.wait_for(self.inner.fail, error)
        if self._span is not None:
            self._failure = Exception(error) if isinstance(error, str) else error
        return was_wanted

    def __enter__(self) -> Self:
        if self._is_entered:
            raise UsageError("this request was already entered")
        self._is_entered = True
        if (tracer := tracing.tracer) is not None:
            self._span = tracer.answer(self.trace_context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._server.inner.affinity.is_left_in_child(error):
            return False
        if self._span is not None:
            failure, self._failure = self._failure, None  # its traceback may refer to this request
            self._span.end(failure if error is None else error)
        try:
            self._server.call(leave, self.inner, error)
        except ClosedError:
            leave(self.inner, error)  # no client waits for an answer, and no other thread uses the request
        return isinstance(error, Exception)
