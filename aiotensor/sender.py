"""Send tensors to the receiver at an endpoint; the implementation is in `aiotensor.sending`."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Self

import torch

from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.sending.capacity import SenderCapacity
from aiotensor.sending.grants import unopened_statistics
from aiotensor.sending.message import Message
from aiotensor.sending.open_message import OpenMessage
from aiotensor.sending.pipeline import Pipeline
from aiotensor.sending.posting import Posts
from aiotensor.sending.settings import Settings
from aiotensor.statistics.counters import ErrorCounter, new_counts
from aiotensor.tensors.source import Sendable
from aiotensor.transports.endpoints import Endpoint, TcpArguments, route_to
from aiotensor.types import CurveKey, SenderStatistics, TensorHandle

__all__ = ["OpenMessage", "TensorSender", "capacity_of", "posts_of"]


class TensorSender(LoopObject):
    """Send tensors to the receiver at the other end of an endpoint.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Opening does not
    wait for the receiver: messages sent before the receiver starts wait for it. If a receiver is lost, the
    next receiver at the same endpoint replaces it: the messages in flight are lost with `PeerLostError`, and
    later sends go to the new receiver.

    Args:
        endpoint: the location of the receiver: an address such as ``unix:///run/user/1000/engine.sock``, a
            `TensorQueue`, or a `multiprocessing.Queue` if the application cannot use a `TensorQueue`. Both
            sides find each other over such a queue, which must carry nothing else.
        max_concurrent_videos: the maximum number of messages in flight, that is, begun by this sender, and
            neither fully taken by the receiver nor discarded. Further sends wait in the order of the calls.
        arena_bytes: the maximum number of bytes of shared memory that this sender uses at once. Memory is
            in use as long as a tensor in it exists, here or at the receiver, taken or not. In a container,
            `arena_bytes` must fit into the memory limit: beyond the limit, the kernel kills a process, and
            no call raises an error. Opening logs a warning if `arena_bytes` does not fit.
        keep_warm_s: the time in seconds after which unused shared memory is returned to the system; None
            keeps it. A copy into new memory takes several times as long as a copy into warm memory, so the
            memory is kept for the next tensor, but not forever, because other programs may need it.
        long_wait_s: the time in seconds after which a wait for a permit or for memory is logged, once, with
            the holders, their resources, and how long they have held them; None for never.
        max_wait_s: the time in seconds after which a wait for a permit, for memory, for other copies, or for
            a receiver that is not connected or does not read, ends with `WouldBlockError`; None for never.
            It applies to each wait separately. An overloaded server can use it to reject work in time.
        grace_s: the time in seconds for which calls may wait for a receiver that has not been started or was
            lost. After this time without a receiver, calls raise `UnavailableError` at once; with 0, they
            never wait for one. None for no limit but `max_wait_s`. It does not apply to `ready`.
        secret_key: the CURVE secret key of this sender, for a receiver at ``tcp://`` on another machine.
        server_key: the CURVE public key of that receiver.
        peer_timeout_s: the time in seconds without an answer after which the receiver at ``tcp://`` is lost;
            None means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: the endpoint or a limit has the wrong type.
        ValueError: the address is invalid, or a limit is out of bounds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        max_concurrent_videos: int = 8,
        arena_bytes: int = 1 << 30,
        *,
        keep_warm_s: float | None = 30.0,
        long_wait_s: float | None = 10.0,
        max_wait_s: float | None = None,
        grace_s: float | None = None,
        secret_key: CurveKey | None = None,
        server_key: CurveKey | None = None,
        peer_timeout_s: float | None = None,
    ) -> None:
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("TensorSender")
        self._route = route_to(endpoint, TcpArguments(True, secret_key, server_key, (), peer_timeout_s))
        self._settings = Settings.checked(
            max_concurrent_videos, arena_bytes, keep_warm_s, long_wait_s, max_wait_s, grace_s
        )
        self._errors = ErrorCounter()
        self._counts = new_counts(SenderStatistics)
        self._capacity = SenderCapacity(self._route.label, self._settings, self.affinity)
        # Created by `__aenter__`, because they belong to a loop.
        self._pipeline: Pipeline | None = None
        self._posts: Posts | None = None

    @property
    def id(self) -> str:
        """The id of this sender, which its handles contain."""
        return self._id

    @property
    def receiver_id(self) -> str | None:
        """The id of the connected receiver; None while none is connected, or before it has answered."""
        return None if self._pipeline is None else self._pipeline.sessions.receiver_id

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._pipeline = self._capacity.pipeline = Pipeline(
                self._id,
                self._route,
                self._settings,
                self._counts,
                self._errors,
                self._capacity.listeners,
            )
            self._posts = Posts(self._pipeline, self._errors)
            self._pipeline.open()
        except BaseException:
            self.affinity.close()
            raise
        self.affinity.settle(self, self._route.label)
        return self

    async def ready(self, *, nbytes: int | None = None) -> None:
        """Wait until a receiver has admitted this sender, or until a tensor can be sent without waiting.

        Use it in a readiness probe, or to find out at startup whether a receiver would refuse this sender:
        opening a sender does not wait for the receiver. Returns immediately while the sender is admitted and
        connected.

        With `nbytes`, the call also waits until a permit and this much memory are free, no other call waits
        for them, and the receiver reads: `send_nowait` would then succeed. An application can wait in this
        way before it reads its next upload. The call acquires nothing, so other calls may use the capacity
        first; `message` acquires a permit.

        Args:
            nbytes: the bytes of shared memory that the next message needs, 0 for a permit without memory;
                None to wait only for the receiver.

        Waits at most `max_wait_s` in total, and for the next receiver if the receiver closes during the wait.
        Cancellation has no side effects.

        Raises:
            ValueError: `nbytes` is negative.
            TooLargeError: `nbytes` exceeds `arena_bytes`.
            RefusedError: the receiver refused this sender, because of a limit or its version.
            WouldBlockError: the call waited for longer than `max_wait_s`.
            PeerLostError: a receiver broke the protocol.
            AccessDeniedError: the receiver runs as another user.
            UsageError: the process at the address is not a receiver.
            ClosedError: this sender was closed, possibly during the wait.
        """
        with self._errors:
            await self._opened().readiness.ready(nbytes)

    async def send(self, tensor: Sendable) -> TensorHandle:
        """Send a message of one tensor, and return the handle that names it for the receiver.

        When the call returns, the tensor has been copied and may be changed or freed, except for a tensor
        from `allocate`, whose memory the receiver reads. Sending never changes the tensor itself.

        Args:
            tensor: a dense tensor on the CPU of any shape and dtype, a numpy array, or an object with
                ``__dlpack__``. For a slice, only its own bytes are sent, not its entire storage.

        Waits for a permit, then for bytes of shared memory, each in the order of the calls, then for the
        copy, which runs in a worker thread. Cancellation releases all of them, even during the copy, and
        discards the message if the receiver has not taken it yet.

        If no wait is necessary, as for a small tensor with a free permit, the call does not suspend: it
        completes even in an expired timeout scope, and a long series of such calls blocks all other tasks.

        Raises:
            UnsupportedTensorError: the tensor would not arrive unchanged; no resources were taken for it.
            TooLargeError: the tensor is larger than `arena_bytes`; no resources were taken for it.
            WouldBlockError: the call waited for longer than `max_wait_s`, or the wait would never end. It is
                an `UnavailableError` if no receiver is connected.
            PeerLostError: the receiver died or closed.
            RefusedError: the receiver refused this sender, because of a limit or its version. The next call
                tries again.
            DiscardedError: the message was discarded before it was sent, for example by `discard_all`.
            ClosedError: this sender was closed, possibly during the wait.
            OSError: the machine has no shared memory or no descriptors left. At the memory limit of a
                container no error is raised: the kernel kills a process.
        """
        message: Message | None = None
        span: tracing.Span | None = None
        try:
            pipeline = self._opened()
            if (tracer := tracing.tracer) is not None:
                span = tracer.begin("send tensor", pipeline.label)
            source, plan = pipeline.prepare(tensor)
            message = await pipeline.begin(plan.allocation)
            handle = await pipeline.put(message, source, plan, last=True)
        except BaseException as error:
            self._failed(error, message, span)
            raise
        if span is not None:
            span.end(name=f"{handle.sender}.{handle.message}.{handle.tensor}", nbytes=source.nbytes)
        return handle

    def send_nowait(self, tensor: Sendable) -> TensorHandle:
        """Send a message of one tensor without waiting; the copy runs on this thread.

        Use it for small tensors, or if an error is better than a wait. To a receiver at ``tcp://``, the copy
        is moved after the call, so later messages may arrive before this one, and a failure has the same
        effects as after `post`. Arguments and other errors are those of `send`.

        Raises:
            WouldBlockError: no permit or too few bytes are free, other calls already wait for them, no
                receiver is connected, or it is slow to read.
        """
        with self._errors:
            self._opened()
        return self._opened_posts().post_in(None, tensor, last=True, copies_now=True)[1]

    def post(self, tensor: Sendable) -> TensorHandle:
        """Send a message of one tensor without waiting, and copy the tensor in the worker thread afterwards.

        For callers that must not wait, such as the hooks of an encoder: the call takes a permit and memory
        immediately, announces the number of the message, and returns. Later messages may arrive before this
        one. Arguments and other errors are those of `send`.

        The tensor must not change until `copied` returns for its handle, until the receiver has received it,
        or until `drain` returns. If the copy fails, the message is discarded, and the error is logged, raised
        by `copied`, and counted in `statistics`. Closing the sender waits for the copy; if closing is
        cancelled, the message is discarded.

        Raises:
            WouldBlockError: no permit or too few bytes are free, other calls already wait for them, no
                receiver is connected, or it is slow to read.
        """
        with self._errors:
            self._opened()
        return self._opened_posts().post_in(None, tensor, last=True)[1]

    async def copied(self, handle: TensorHandle) -> None:
        """Wait until a tensor that was sent with `post` is copied, and may be changed or freed.

        A tensor from `allocate` is not copied: the receiver reads the same memory, as after `send`. For the
        handles of other calls, the call returns immediately. Cancellation has no side effects: the copy
        continues.

        Args:
            handle: the result of `post`. The sender remembers the errors of the last 256 failed messages.

        Raises:
            ValueError: the handle belongs to another sender.
            OSError: the machine has no memory left for the copy; the message was discarded.
            WouldBlockError: the copy waited for other copies, or for a receiver that does not read, for
                longer than `max_wait_s`; the message was discarded.
            DiscardedError: either side discarded the message before the tensor was copied.
            PeerLostError: the receiver died or closed before the tensor was copied.
            ClosedError: this sender was closed, and closing was cancelled before the tensor was copied.
        """
        with self._errors:
            self._checked()
            self._check_own(handle)
        await self._opened_posts().copied(handle)  # a failed copy was counted when it failed

    def message(self) -> OpenMessage:
        """Begin a message of several tensors, which share one permit and arrive together or not at all.

        Use it as ``async with sender.message() as message:``, and send each tensor in the block with
        ``await message.send(tensor)``. Entering the block waits for a permit, at most `max_wait_s`; the end
        of the block completes the message. An exception or a cancellation that leaves the block discards the
        message.
        """
        with self._errors:
            return OpenMessage(self, self._checked(), self.affinity, self._errors)

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory, which is sent without a copy.

        A contiguous or permuted view of the tensor is also sent without a copy. Write to the tensor before
        you send it, because the receiver reads the same memory afterwards. Its bytes are in use as long as
        the tensor, a view of it, or a received tensor exists.

        Args:
            shape: the sizes of the tensor's dimensions, in elements.
            dtype: the type of the tensor's elements.

        Waits for bytes of shared memory, in the order of the calls; cancellation releases them. For a message
        of several tensors, call `OpenMessage.allocate` in its block: a task that holds memory while it waits
        for a permit may wait for a message that has the permit and waits for memory. Other errors are those
        of `send`.

        Raises:
            TypeError: the dtype is not a torch dtype.
            UnsupportedTensorError: a tensor of this dtype cannot be sent.
            ValueError: a size is negative.
            TooLargeError: the tensor would be larger than `arena_bytes`; or it is empty, and its other sizes
                are too large to address.
            WouldBlockError: the call waited for longer than `max_wait_s`; or this task is in the block of a
                message, and all of `arena_bytes` is held by messages that wait for more of it.
        """
        try:
            return await self._opened().allocate(shape, dtype)
        except Exception as error:
            self._errors.add(error)
            raise

    def discard(self, handle: TensorHandle) -> None:
        """Discard the whole message of a handle, because it is no longer needed.

        The permit is free immediately, and the memory as soon as the receiver has released it. A message
        that was already taken or discarded is not affected.

        Raises:
            ValueError: the handle belongs to another sender.
        """
        with self._errors:
            pipeline = self._checked()
            self._check_own(handle)
        pipeline.abandon_number(handle.message)

    def discard_all(self) -> int:
        """Discard every message that the receiver has not taken yet, and return their number.

        The effect on each message is the same as with `discard`.
        """
        with self._errors:
            pipeline = self._checked()
        return pipeline.abandon_all()

    async def drain(self) -> None:
        """Wait until every message sent before this call was taken or discarded.

        Cancellation has no side effects.

        Raises:
            PeerLostError: the receiver died or closed before it took all of them.
            RefusedError: the receiver refused this sender, and took no message.
            ClosedError: this sender was closed during the wait.
        """
        with self._errors:
            await self._opened().grants.drain()

    def statistics(self) -> SenderStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        if self._pipeline is None:
            return unopened_statistics(self._settings, self._errors)
        return self._pipeline.grants.statistics()

    async def aclose(self) -> None:
        """Close the sender; complete messages can still be received, and waiting calls raise `ClosedError`.

        Waits until the tensors of posted messages are copied, until other copies in the worker thread have
        stopped, and until the connection has accepted all sent messages. It does not wait until the receiver
        takes them; for that, call `drain` first. Cancellation closes the sender immediately; if the
        connection has not accepted all messages by then, the receiver treats this sender as lost, and drops
        all its messages that were not received. Closing again has no effect.
        """
        self.affinity.check_place()
        was_open = self.affinity.close()
        if was_open and self._pipeline is not None:
            with self.affinity.leaving():
                await self._pipeline.close(self._opened_posts().settle)

    def _details(self) -> list[str]:
        details = [f"at {self._route.label}"]
        if self._pipeline is not None and self.affinity.is_open:
            permits = self._pipeline.grants.permits.budget
            details.append(f"{permits.in_use} of {permits.limit} messages in flight")
        return details

    def _checked(self) -> Pipeline:
        """Return the pipeline, after checking that this sender is open and belongs to this loop."""
        self.affinity.check()
        if self._pipeline is None:
            raise AssertionError("an open sender has a pipeline")
        return self._pipeline

    def _check_own(self, handle: TensorHandle) -> None:
        if handle.sender != self._id:
            raise ValueError(f"this handle belongs to sender {handle.sender}, not to this one ({self._id})")

    def _failed(self, error: BaseException, message: Message | None, span: tracing.Span | None) -> None:
        """Discard the message of a failed or cancelled call, and count its error."""
        try:
            if message is not None and self._pipeline is not None:
                self._pipeline.abandon(message)
            self._errors.add(error)
        finally:
            if span is not None:
                span.end(error)

    def _opened_posts(self) -> Posts:
        if self._posts is None:
            raise AssertionError("an open sender has posted messages")
        return self._posts

    def _opened(self) -> Pipeline:
        """Return the pipeline, after checking that this sender is open here and can send messages."""
        if asyncio._get_running_loop() is not self.affinity.open_in:
            self.affinity.check()
        pipeline = self._pipeline
        if pipeline is None:
            raise AssertionError("an open sender has a pipeline")
        return pipeline


def capacity_of(sender: TensorSender) -> SenderCapacity:
    """Return the capacity of a sender, for clients that choose among several senders."""
    return sender._capacity


def posts_of(sender: TensorSender) -> Posts:
    """Return the posted messages of an open sender, for hooks that post several tensors in one message.

    Raises:
        AioTensorError: the sender is not open here.
    """
    sender._opened()
    return sender._opened_posts()
