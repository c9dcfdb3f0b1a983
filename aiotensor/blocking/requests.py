"""Blocking requests, which a blocking server receives and answers."""

from collections.abc import Mapping
from types import TracebackType
from typing import Generic, Self, TypeVar

from aiotensor import channel
from aiotensor.blocking.portal import BlockingObject
from aiotensor.channel.cancelling import CancelOnce
from aiotensor.errors import ClosedError
from aiotensor.types import ServerStatistics

__all__ = ["Request"]

M = TypeVar("M")


class Request(Generic[M]):
    """A message of a client, to be answered once.

    It is used like an `aiotensor.Request`, but its thread cannot be cancelled: long work should check
    `is_wanted` repeatedly. Use it as ``with request: request.answer(work(request.message))``. An `Exception`
    in the block is sent to the client and logged; `SystemExit` and `KeyboardInterrupt` propagate, and the
    client gets `PeerLostError`. After the block, the message and its tensors are released.
    """

    def __init__(
        self, server: BlockingObject[channel.MessageServer[M], ServerStatistics], inner: channel.Request[M]
    ) -> None:
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
