"""A message that the server has taken, with the methods that answer it."""

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.channel.requests import ENDED, Answer, Cause, Incoming, Requests, cause_of, closed
from aiotensor.errors import ClosedError, UsageError
from aiotensor.memory.copying import CopyAbandonedError
from aiotensor.runtime import tracing
from aiotensor.runtime.logs import logger_of

logger = logger_of("server")

M = TypeVar("M")


class Request(Generic[M]):
    """A message of a client, to be answered once.

    To answer several requests at a time, use a task for each, and enter the request with ``async with``::

        async def answer(request):
            async with request:
                await request.answer(await work(request.message))

    When the client disconnects or cancels its request, the task in the block is cancelled, once, as
    `asyncio.Task.cancel` does: cleanup may wait, and code that catches `asyncio.CancelledError` is not
    cancelled again. The end of the block absorbs this cancellation; any other one, such as that of
    `asyncio.timeout` around the block, propagates.

    An `Exception` in the block is sent to the client as `RemoteError` and logged; leaving the block without
    an answer sends an error, too. Other exceptions propagate: `SystemExit`, `KeyboardInterrupt` and
    `asyncio.CancelledError` mean that this process stops its work, so the client gets `PeerLostError`. If a
    future that the block awaits is cancelled, and not the task itself, the `CancelledError` is logged, too.
    At the end of the block, the message is released with its tensors. If a request is garbage-collected
    without an answer, its client gets `PeerLostError`.
    """

    def __init__(self, incoming: Incoming, message: M, requests: Requests[M]) -> None:
        self._box = [message]  # empty when the message was released
        self._incoming = incoming
        self._requests = requests
        self._is_answered = self._is_entered = False
        self._span: tracing.Span | None = None  # of the block
        self._failure: BaseException | None = None  # the error of `fail`, for the span
        dropped = requests.dropped
        incoming.request = weakref.ref(self, lambda _: dropped(incoming))  # does not keep the server open

    def __repr__(self) -> str:
        state = "answered" if self._is_answered else "unanswered" if self.is_wanted else "not wanted"
        return f"<{type(self).__name__} {state}, of process {self.client_pid}>"

    @property
    def message(self) -> M:
        """The message of the client, with its tensors in place."""
        if not self._box:
            raise UsageError(
                "this request was answered, or its block has ended: its message is no longer available"
            )
        return self._box[0]

    @property
    def client_pid(self) -> int:
        """The process id of the client, as the client reports it."""
        return self._incoming.session.pid or 0

    @property
    def is_wanted(self) -> bool:
        """Whether the client still waits for an answer."""
        return self._incoming.is_wanted

    @property
    def trace_context(self) -> Mapping[str, str] | None:
        """The trace context of the client; None unless tracing is enabled in both processes."""
        return self._incoming.trace_context

    async def answer(self, answer: object) -> bool:
        """Send the answer, and return whether the client still waited for it.

        Sends nothing if the client sent the message with `send`, cancelled the request, or disconnected.

        Afterwards the request releases its message, so that the shared memory of its tensors is free before
        the next message arrives; keep your own references to the parts that you still need.

        Args:
            answer: an object of the client's `answer_type`, with tensors and arrays anywhere in it. Do not
                change any part of it before the call returns. A large answer is encoded in a thread, which
                continues for a moment if the call is cancelled.

        Waits for memory if the answer has large tensors, and while the client does not read. If the call is
        cancelled before the answer is sent, the request can be answered again.

        Raises:
            UsageError: the request was answered before.
            TypeError: part of the answer cannot be encoded, as in `MessageClient.request`; answer again, or
                call `fail`.
            UnsupportedTensorError: a tensor would arrive changed.
            TooLargeError: the tensors exceed the server's `arena_bytes`, or the body exceeds the client's
                `max_body_bytes`; nothing was sent, so answer again, or call `fail`.
            WouldBlockError: all memory is used by answers that wait for more of it.
            OSError: the machine has no shared memory, no descriptors or no threads left.
            ClosedError: the server was closed.
        """
        if self._is_answered:
            raise _answered()
        self._is_answered = True
        box = [answer]
        del answer
        incoming, requests, session = self._incoming, self._requests, self._incoming.session
        was_wanted = False
        if incoming.state is not ENDED and incoming.message.asks:
            sent = Answer(
                requests.memory,
                requests.shares_memory,
                None,
                session.max_body_bytes,
                affinity=requests.affinity,
                incoming=incoming,
                trace=None if (tracer := tracing.tracer) is None else tracer.context(),
            )
            try:
                await sent.place(box)
                while not session.transport.is_writable and incoming.state is not ENDED:
                    await session.accepted()
                if incoming.state is ENDED:
                    pass
                elif sent.blocks or session.transfers:
                    session.post(sent, partial(session.answer, sent))
                    if session.transport.mover is not None:
                        await session.announced(sent)
                else:
                    session.answer(sent)
            except BaseException as error:
                self._is_answered = not incoming.is_wanted
                if isinstance(error, CopyAbandonedError):
                    raise closed() from None
                raise
            finally:
                if sent.blocks or sent.owned:
                    sent.release()
            was_wanted = incoming.state is not ENDED
            requests.counts["answers"] += was_wanted
        if requests.affinity.is_closed and not was_wanted:
            raise closed()
        requests.end(incoming)
        self._box = []
        return was_wanted

    async def fail(self, error: BaseException | str) -> bool:
        """Answer with an error, and return whether the client still waited for an answer.

        Args:
            error: the error or its text. The client raises a `RemoteError` with the name of the error's type
                and its text, or a `PeerLostError` if the error is not an `Exception`, such as `SystemExit`.

        Raises:
            UsageError: the request was answered before.
            ClosedError: the server was closed.
        """
        if self._is_answered:
            raise _answered()
        self._is_answered = True
        if self._span is not None:
            self._failure = Exception(error) if isinstance(error, str) else error
        was_wanted = self._fail(error)
        if self._requests.affinity.is_closed and not was_wanted:
            raise closed()
        return was_wanted

    async def __aenter__(self) -> Self:
        self._enter()
        block = self._incoming.block = CancelOnce()
        block.__enter__()
        if not self._incoming.is_wanted and self._incoming.message.asks:
            block.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        block = self._incoming.block
        if block is None:
            raise AssertionError("the block was entered before it ended")
        if self._requests.affinity.is_left_in_child(error):
            return False
        was_cancelled = block.__exit__(kind, error, trace)
        self._end_span(error)
        self._leave(None if was_cancelled else error)
        if isinstance(error, asyncio.CancelledError) and not was_cancelled and not _is_being_cancelled():
            self._log_failure(error)  # a future that the handler awaited was cancelled
        return was_cancelled or isinstance(error, Exception)

    # The parts of a block that `blocking` has, too: the first two in the thread of the handler

    def _enter(self) -> None:
        if self._is_entered:
            raise UsageError("this request was already entered")
        self._is_entered = True
        if (tracer := tracing.tracer) is not None:
            self._span = tracer.answer(self._incoming.trace_context)

    def _end_span(self, error: BaseException | None) -> None:
        if self._span is not None:
            failure, self._failure = self._failure, None  # its traceback may refer to this request
            self._span.end(failure if error is None else error)

    def _leave(self, error: BaseException | None) -> None:
        """End the block: release the message, and send an error if there was no answer."""
        self._release()
        if not self._is_answered and self._incoming.is_wanted:
            self._requests.affinity.check_place()
            self._is_answered = True
            self._fail(UsageError("the server's handler ended without an answer") if error is None else error)
        if isinstance(error, Exception) and not isinstance(error, ClosedError):
            self._log_failure(error)

    def _log_failure(self, error: BaseException) -> None:
        logger.error(
            "answering a request from process %s failed",
            self.client_pid,
            exc_info=error,
            extra={
                "event": "request_failed",
                "peer_pid": self.client_pid,
                "error": type(error).__name__,
                "reason": cause_of(error).text,
            },
        )

    def _release(self) -> None:
        """Release the message."""
        self._box = []

    def _fail(self, error: BaseException | str) -> bool:
        cause = Cause("Exception", error) if isinstance(error, str) else cause_of(error)
        return self._requests.fail(self._incoming, cause)


def has_ended(request: Request[Any]) -> bool:
    """Return whether a request was answered or cancelled."""
    return request._incoming.has_ended


def enter_batch(request: Request[Any], block: CancelOnce) -> None:
    """Count the cancellation of a request in the block of its batch, until `leave_batch`."""
    request._incoming.block = block


def leave_batch(request: Request[Any]) -> None:
    """Restore the usual effect of the cancellation of a request."""
    request._incoming.block = None


def fail_batch(batch: Sequence[Request[Any]], error: BaseException) -> None:
    """Answer all requests of a batch with the error of their handler, and log an `Exception` once."""
    for request in batch:
        if (tracer := tracing.tracer) is not None:
            tracer.answer(request.trace_context).end(error)
        request._release()
        if not request._is_answered and request.is_wanted:
            request._is_answered = True
            request._fail(error)
    was_interrupted = isinstance(error, asyncio.CancelledError) and not _is_being_cancelled()
    if was_interrupted or (isinstance(error, Exception) and not isinstance(error, ClosedError)):
        logger.error(
            "answering a batch of %s requests failed",
            len(batch),
            exc_info=error,
            extra={
                "event": "batch_failed",
                "requests": len(batch),
                "error": type(error).__name__,
                "reason": cause_of(error).text,
            },
        )


def fail_unstarted(request: Request[Any]) -> None:
    """Fail a request if the task that was to answer it was cancelled before it began."""
    if request._incoming.block is None and request.is_wanted:
        request._fail(asyncio.CancelledError())


def _answered() -> UsageError:
    return UsageError("this request was already answered")


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
