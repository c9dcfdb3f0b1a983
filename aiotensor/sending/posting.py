"""Posted messages: the calls do not wait, and a task for each message copies the tensors afterwards.

    permit and memory, at once -> `Begin`, which fixes the number -> copies, in order -> announcement

A failed copy discards the message: the receiver is notified, and `Posts.copied` raises the error.
"""

import asyncio
from collections import OrderedDict, deque
from contextvars import Context, copy_context
from typing import NamedTuple

import torch
from torch.nn import Parameter

from aiotensor.errors import AioTensorError, DiscardedError, TooLargeError, again
from aiotensor.protocol.frames import MAX_TENSORS, Attributes
from aiotensor.runtime import tracing
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.sending.message import Message
from aiotensor.sending.pipeline import Pipeline
from aiotensor.statistics.counters import ErrorCounter
from aiotensor.tensors.allocations import Block
from aiotensor.tensors.dtypes import DTYPE_NAMES
from aiotensor.tensors.placement import Plan
from aiotensor.tensors.source import Sendable, Source
from aiotensor.tensors.views import with_attributes
from aiotensor.types import TensorHandle

__all__ = ["PostedMessage", "Posts"]

logger = logger_of("sender")

_REMEMBERED_FAILURES = 256


class _Pending(NamedTuple):
    """A tensor that is still to be announced.

    Attributes:
        block: the block for its copy; None if it is not copied.
        is_copied: whether the block already contains the copy.
        context: the context of the call that posted it, with its span; None without tracing.
    """

    source: Source
    plan: Plan
    block: Block | None
    is_copied: bool
    last: bool
    context: Context | None


class Posts:
    """The posted messages of one sender; belongs to the running loop.

    Args:
        pipeline: sends their tensors.
        errors: counts the errors of copies.
    """

    def __init__(self, pipeline: Pipeline, errors: ErrorCounter) -> None:
        self._pipeline = pipeline
        self._errors = errors
        self._copying: dict[int, PostedMessage] = {}  # by the number of the message
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: OrderedDict[int, Exception] = OrderedDict()  # of messages that were not copied
        self._changes = Waiters()

    def message(self, nbytes: int) -> "PostedMessage":
        """Begin a message of several tensors; errors are those of `PostedMessage`.

        Args:
            nbytes: the bytes of shared memory that its first tensor needs, for the text of the error.
        """
        return PostedMessage(self, self._pipeline, nbytes)

    def post_in(
        self,
        message: "PostedMessage | None",
        value: Sendable,
        *,
        last: bool = False,
        copies_now: bool = False,
    ) -> "tuple[PostedMessage, TensorHandle]":
        """Post a tensor in a message, and return both the message and the handle.

        Errors are those of `TensorSender.post`.

        Args:
            message: the message; None to begin a new one, which is discarded if this call fails.
            value: the tensor.
            last: whether it is the last tensor of the message.
            copies_now: whether to copy the tensor on this thread, so that it may change afterwards.
        """
        posted, span = message, None
        try:
            if (tracer := tracing.tracer) is not None:
                span = tracer.begin("send tensor", self._pipeline.label)
            source, plan = self._pipeline.prepare(value)
            if posted is None:
                posted = self.message(plan.new_bytes)
            handle = posted.post(source, plan, last=last, copies_now=copies_now)
        except BaseException as error:
            try:
                if message is None and posted is not None:
                    posted.abandon()
                self._errors.add(error)
            finally:
                if span is not None:
                    span.end(error)
            raise
        if span is not None:
            span.end(name=f"{handle.sender}.{handle.message}.{handle.tensor}", nbytes=source.nbytes)
        return posted, handle

    async def copied(self, handle: TensorHandle) -> None:
        """Wait until a posted tensor is copied, as `TensorSender.copied` does."""
        while (posted := self._copying.get(handle.message)) is not None and posted.is_pending(handle.tensor):
            await self._changes.wait()
        failure = self._failures.get(handle.message)
        if failure is not None:
            raise again(failure)

    async def settle(self) -> None:
        """Wait until all copies have ended; cancellation stops them."""
        try:
            while self._tasks:
                await self._changes.wait()
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        # A separate method: the error keeps the frame of `settle` alive, where a variable would keep a task
        # and its tensor alive.
        for task in self._tasks:
            task.cancel()

    # The copies

    def begin_copies(self, posted: "PostedMessage", number: int) -> None:
        """Start the task that copies the pending tensors of a message."""
        self._copying[number] = posted
        task = asyncio.get_running_loop().create_task(posted.send_pending())
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._copies_ended(posted, number, task))

    def _copies_ended(self, posted: "PostedMessage", number: int, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            posted.copies_failed()
            if error is not None and not posted.message.has_ended:
                self._failed(posted.message, number, error)
            else:  # the receiver is gone, the message was discarded, or the task was cancelled
                self._pipeline.abandon(posted.message)
                self._remember(number, self._pipeline.grants.error(posted.message))
        if not posted.is_copying:
            self._copying.pop(number, None)
        self._changes.wake()

    def _failed(self, message: Message, number: int, error: BaseException) -> None:
        """Discard the message of a failed copy, and log the error, since perhaps no call ever raises it."""
        self._errors.add(error)
        reason = str(error)  # the log must not keep the error: its traceback refers to the tensor
        logger.error(
            "copying a posted tensor failed, and its message was discarded: %s",
            reason,
            exc_info=None if isinstance(error, (AioTensorError, OSError)) else error,
            extra={
                "event": "post_failed",
                "sender_id": self._pipeline.sender,
                "error": type(error).__name__,
                "reason": reason,
            },
        )
        if isinstance(error, Exception):
            self._remember(number, again(error))
        self._pipeline.abandon(message)

    def _remember(self, number: int, error: Exception) -> None:
        self._failures[number] = error
        if len(self._failures) > _REMEMBERED_FAILURES:
            self._failures.popitem(last=False)


class PostedMessage:
    """A message whose tensors are posted one after the other.

    Args:
        posts: the posted messages of the sender.
        pipeline: sends the tensors.
        nbytes: the bytes of shared memory that the first tensor needs, for the text of the error.

    Attributes:
        message: the message, with its state and permit.
        is_copying: whether a task copies its tensors.

    Raises:
        WouldBlockError: no permit is free, or no receiver is connected and reading.
        RefusedError: the last receiver refused this sender, and may still be running.
    """

    def __init__(self, posts: Posts, pipeline: Pipeline, nbytes: int) -> None:
        self._posts = posts
        self._pipeline = pipeline
        self.message = pipeline.begin_nowait(nbytes)
        self._pending: deque[_Pending] = deque()
        self._count = 0
        self.is_copying = False

    def is_pending(self, tensor: int) -> bool:
        """Return whether a tensor, by its number, is still to be announced."""
        return self.is_copying and self.message.count <= tensor < self._count

    def post(
        self, source: Source, plan: Plan, *, last: bool = False, copies_now: bool = False
    ) -> TensorHandle:
        """Add a tensor, and return its handle; a failure does not end the message.

        Arguments are those of `Posts.post_in`.

        Raises:
            WouldBlockError: not enough shared memory is free.
            TooLargeError: the message already has the maximum number of tensors.
            DiscardedError: the message was discarded or finished.
            PeerLostError: the receiver was lost.
        """
        pipeline, message = self._pipeline, self.message
        if message.is_finished:
            raise DiscardedError("this message has ended: begin a new one")
        pipeline.grants.check_open(message)
        if self._count >= MAX_TENSORS:
            raise TooLargeError(
                f"a message has at most {MAX_TENSORS} tensors",
                limit=MAX_TENSORS,
                requested=self._count + 1,
                unit="tensors",
            )
        block = handle = None
        if not self.is_copying and pipeline.can_announce_now(plan):
            handle = pipeline.announce_now(message, source, plan, last=last)
        elif plan.new_bytes:
            block = pipeline.block_nowait(message, plan.new_bytes)
            if copies_now:
                pipeline.copy_now(source, block)
                if isinstance(source, torch.Tensor):  # the strides of the tensor may change, too
                    attributes = Attributes(source.requires_grad, isinstance(source, Parameter))
                    source = with_attributes(source.detach(), attributes)
                if not self.is_copying and pipeline.sessions.mover is None:
                    handle = pipeline.announce_copy(block, message, source, last=last)
        if handle is not None:
            self._count += 1
            message.is_finished = last
            return handle
        number = pipeline.begin_announced(message)
        context = None if tracing.tracer is None else copy_context()
        self._pending.append(_Pending(source, plan, block, copies_now, last, context))
        message.is_finished = last
        tensor, self._count = self._count, self._count + 1
        if not self.is_copying:
            self.is_copying = True
            self._posts.begin_copies(self, number)
        device = "cpu" if source.is_cpu else str(source.device)
        return TensorHandle(
            pipeline.sender, number, tensor, DTYPE_NAMES[source.dtype], tuple(source.shape), device
        )

    def finish(self) -> None:
        """Finish the message: it becomes whole once all its tensors are announced."""
        if self.message.has_ended or self.message.is_finished:
            return
        self.message.is_finished = True
        if not self.is_copying:
            self._pipeline.complete(self.message)

    def abandon(self) -> None:
        """Discard the message."""
        self._pipeline.abandon(self.message)

    # The copies

    async def send_pending(self) -> None:
        """Copy and announce the pending tensors in order, then complete the message if it is finished."""
        pipeline, message = self._pipeline, self.message
        last = False
        while self._pending:
            source, plan, block, is_copied, last, context = self._pending.popleft()
            if context is not None:  # only this task uses the context that changes
                for variable, value in context.items():
                    variable.set(value)
            if block is None:
                await pipeline.put(message, source, plan, last=last)
            else:
                await pipeline.put_into(block, message, source, last=last, is_copied=is_copied)
            del source
        self.is_copying = False
        if message.is_finished and not last:
            pipeline.complete(message)

    def copies_failed(self) -> None:
        """Release the blocks of the pending tensors after a failure or a cancellation."""
        self.is_copying = False
        for pending in self._pending:
            if pending.block is not None:
                self._pipeline.grants.memory.unpin_owner(pending.block.number)
        self._pending.clear()
