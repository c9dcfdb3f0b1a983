"""A message of several tensors, as the callers of a sender see it."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import torch

from aiotensor.errors import DiscardedError, TooLargeError, UsageError
from aiotensor.protocol.frames import MAX_TENSORS
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.sending.message import Message, MessageState, enter_block
from aiotensor.sending.pipeline import Pipeline
from aiotensor.statistics.counters import ErrorCounter
from aiotensor.tensors.source import Sendable
from aiotensor.types import TensorHandle

__all__ = ["OpenMessage", "check_unfinished", "enter_in_thread", "owner_of"]

_NOT_BEGUN = "this message has not begun yet: use `async with sender.message() as message`"


class OpenMessage:
    """A message that is being sent, made by `TensorSender.message`.

    Args:
        owner: the sender, which is not garbage-collected before the message.
        pipeline: the pipeline of the sender.
        affinity: the process, thread and loop of the sender.
        errors: counts the errors of calls.
    """

    def __init__(
        self, owner: object, pipeline: Pipeline, affinity: LoopAffinity, errors: ErrorCounter
    ) -> None:
        self._message: Message | None = None
        self._owner = owner
        self._pipeline = pipeline
        self.affinity = affinity
        self._errors = errors
        self._is_beginning = False
        self._sending = 0  # the calls of `send` that have not returned
        self._is_finished = False

    def __repr__(self) -> str:
        message = self._message
        state = "new" if message is None else f"{message.state.value}, {message.count} tensors"
        return f"<OpenMessage {state}, of {self._owner!r}>"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing() or (message := self._message) is None or message.state is not MessageState.OPEN:
            return
        self.affinity.freed(self, partial(self._pipeline.abandon, message))

    async def __aenter__(self) -> Self:
        with self._errors:
            if self._is_beginning or self._message is not None:
                raise UsageError("this message has already begun: begin another with sender.message()")
            self.affinity.check()
            self._is_beginning = True
            try:
                self._message = await self._pipeline.begin()
            finally:
                self._is_beginning = False
            enter_block(self._message, asyncio.current_task())
        return self

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory for this message, which is sent without a copy.

        Like `TensorSender.allocate`, but the memory is accounted to this message: if all of `arena_bytes` is
        held by messages that wait for more of it, one of the waiting calls raises `WouldBlockError`.

        Args:
            shape: the sizes of the tensor's dimensions, in elements.
            dtype: the type of the tensor's elements.

        Waits for bytes of shared memory, in the order of the calls; cancellation releases them.

        Raises:
            TypeError: the dtype is not a torch dtype.
            UnsupportedTensorError: a tensor of this dtype cannot be sent.
            ValueError: a size is negative.
            TooLargeError: the tensor would be larger than `arena_bytes`; or it is empty, and its other sizes
                are too large to address.
            WouldBlockError: all of `arena_bytes` is held by messages that wait for more of it, so that
                waiting would never end; or the call waited for longer than `max_wait_s`.
            PeerLostError: the receiver died or closed.
            DiscardedError: the message was discarded, by either side, or its block has ended.
            UsageError: the message has not begun yet.
            ClosedError: the sender was closed, possibly during the wait.
            OSError: the machine has no shared memory or no descriptors left.
        """
        with self._errors:
            self.affinity.check()
            return await self._pipeline.allocate(shape, dtype, self._open_message())

    async def send(self, tensor: Sendable) -> TensorHandle:
        """Send one tensor of the message, and return its handle.

        The receiver can take the tensor when the message is whole, after the block. An error in `send`
        releases the resources of this tensor and does not affect the message: the block may catch the error
        and continue. Cancellation does the same, unless the tensor was announced already: then the message
        is discarded, and its block ends with `DiscardedError`.
        Arguments, waiting, cancellation and errors are otherwise those of `TensorSender.send`.

        Raises:
            WouldBlockError: all of `arena_bytes` is held by messages that wait for more of it, so that
                waiting would never end; or the call waited for longer than `max_wait_s`.
            TooLargeError: the message already has the maximum number of tensors.
            DiscardedError: the message was discarded, by either side, or its block has ended.
            UsageError: the message has not begun yet.
        """
        span: tracing.Span | None = None
        try:
            if self._message is None:
                raise UsageError(_NOT_BEGUN)
            self.affinity.check()
            if (tracer := tracing.tracer) is not None:
                span = tracer.begin("send tensor", self._pipeline.label)
            source, plan = self._pipeline.prepare(tensor)
            message = self._open_message()
            if message.count + self._sending >= MAX_TENSORS:
                raise TooLargeError(
                    f"a message has at most {MAX_TENSORS} tensors: stack small ones, or begin another one",
                    limit=MAX_TENSORS,
                    requested=message.count + self._sending + 1,
                    unit="tensors",
                )
            self._sending += 1
            try:
                handle = await self._pipeline.put(message, source, plan, last=False)
            finally:
                self._sending -= 1
        except BaseException as error:
            self._errors.add(error)
            if span is not None:
                span.end(error)
            raise
        if span is not None:
            span.end(name=f"{handle.sender}.{handle.message}.{handle.tensor}", nbytes=source.nbytes)
        return handle

    def _open_message(self) -> Message:
        """Return the message if tensors can be added to it; otherwise, raise an error."""
        message = self._message
        if message is None:
            raise UsageError(_NOT_BEGUN)
        if message.loss is not None:
            raise self._pipeline.grants.error(message)
        if message.state is not MessageState.OPEN:
            raise DiscardedError("this message has ended: begin a new one")
        return message

    def finish(self) -> None:
        """Complete the message now rather than at the end of the block.

        No further tensor can be sent in it. If the block then ends with an exception, the message is
        discarded nevertheless, unless the receiver has already taken it. Finishing again has no effect.

        Raises:
            DiscardedError: the message was discarded, by either side.
            PeerLostError: the receiver died or closed.
            ClosedError: the sender was closed.
            UsageError: a `send` of this message was not awaited, and the message is discarded; or the message
                has not begun yet.
        """
        message, pipeline = self._message, self._pipeline
        with self._errors:
            if message is None:
                raise UsageError(_NOT_BEGUN)
            if self._is_finished:
                return
            if message.has_ended:
                raise pipeline.grants.error(message)  # not taken, because it was not whole
            if self._sending:
                pipeline.abandon(message)
                raise UsageError(
                    "a send of this message was not awaited: await every message.send in its block"
                )
            self._is_finished = True
            pipeline.complete(message)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._message is None or self.affinity.is_left_in_child(error):
            return
        if kind is not None:
            self._pipeline.abandon(self._message)
        else:
            self.affinity.check_place()
            self.finish()


def owner_of(message: OpenMessage) -> object:
    """Return the `TensorSender` that made a message."""
    return message._owner


def check_unfinished(message: OpenMessage) -> None:
    """Raise `UsageError` if a message was completed, by its block or by the request that was sent in it."""
    if message._is_finished:
        raise UsageError(
            "this message or permit was used, or its block has ended: begin another one for each request"
        )


def enter_in_thread(message: OpenMessage) -> None:
    """Record that this thread, rather than the task that entered the block, is in the block of a message."""
    if message._message is not None:
        enter_block(message._message, None)
