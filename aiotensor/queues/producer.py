"""A producer: puts messages into a queue."""

from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import msgspec

from aiotensor.channel.client import MessageClient, SentRequest
from aiotensor.codec.payload import check_body
from aiotensor.errors import (
    AioTensorError,
    ClosedError,
    PeerLostError,
    UnavailableError,
    WouldBlockError,
    again,
)
from aiotensor.queues.folder import QueueSettings, Slot
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import seconds
from aiotensor.runtime.waiting import at_most, until
from aiotensor.types import Usage


class ProducerStatistics(msgspec.Struct, frozen=True):
    """The current usage of one producer, and its totals since it was opened.

    Attributes:
        max_messages: the limit of accepted messages that no consumer has taken.
        messages: the accepted messages that no consumer has taken.
        peak_messages: the most such messages at once.
        waiting: the calls of `put` that wait.
        taken: the messages that consumers have taken.
        redelivered: how often a message was sent again because its consumer was lost.
    """

    max_messages: int
    messages: int
    peak_messages: int
    waiting: int
    taken: int
    redelivered: int


class QueueProducer(LoopObject):
    """Put messages into a queue; made by `MessageQueue.producer`.

    Open it with ``async with``, and share it between the tasks of that event loop. The end of the block waits
    until consumers have taken all messages, and then closes the producer. If the block ends with an
    exception, or the wait is cancelled, the messages that no consumer has taken are dropped. The consumers
    then raise `PeerLostError` at the end, unless another producer takes the place of this one.

    Opening raises `UsageError` if the queue has no free place for a producer, and `ClosedError` if the queue
    was closed. It does not wait for consumers.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.affinity = LoopAffinity("QueueProducer")
        self._settings = settings
        self._client = _Client(settings)
        self._stack = AsyncExitStack()
        self._slot: Slot | None = None
        self._is_aborted = False

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        folder = self._settings.folder
        try:
            self._slot = folder.claim("producer")
            self._stack.callback(folder.release, self._slot)
            await self._stack.enter_async_context(self._client)
        except BaseException:
            self.affinity.close()
            await self._stack.aclose()
            raise
        return self

    async def put(self, message: object, *, timeout: float | None = None) -> None:
        """Put a message into the queue: accept it, and deliver it to one consumer.

        The message may be changed when the call has returned; do not change any part of it before. One
        consumer gets the messages of a producer in their order.

        Args:
            message: an object of the message type of the queue, with tensors and arrays anywhere in it.
            timeout: the maximum time in seconds to wait; None for no limit.

        Waits while the consumers have not taken `max_messages` earlier messages of this producer, while not
        enough of `arena_bytes` is free, and while threads encode and copy a large message. If the call is
        cancelled or raises an error, the message is not in the queue.

        Raises:
            WouldBlockError: the wait exceeded `timeout`, or all memory is used by messages that wait for more
                of it.
            PeerLostError: an earlier message cannot be delivered: its consumer was lost, and the queue does
                not redeliver messages; or all consumers have ended, and none has opened for `grace_s`.
            RemoteError: a consumer could not decode an earlier message, or it has another type. This error is
                raised once, and logged by the consumer; the other messages are delivered.
            TooLargeError: the tensors exceed `arena_bytes`, or the rest of the message `max_body_bytes`.
            TypeError: part of the message cannot be encoded; `TensorEncoder.encode` lists further errors.
            UnsupportedTensorError: a tensor would arrive changed.
            OSError: the machine has no shared memory, no descriptors or no threads left.
            ClosedError: this producer was closed, perhaps during the call.
        """
        self.affinity.check()
        if timeout is not None:
            timeout = seconds("timeout", timeout)
        client = self._client
        client.check()
        box = [message]
        del message  # so that only the caller keeps its tensors alive
        async with at_most(timeout, client.full):
            await client._place(box, None, None, asks=False)

    def put_nowait(self, message: object) -> None:
        """Put a message into the queue as `put` does, or raise `WouldBlockError` instead of waiting.

        This thread encodes and copies even a large message. Arguments and errors are otherwise those of
        `put`.
        """
        self.affinity.check()
        self._client.check()
        self._client.put_now([message])

    async def join(self) -> None:
        """Wait until consumers have taken all messages of this producer.

        Cancellation has no side effects. The call raises the errors of `put` about earlier messages.
        """
        self.affinity.check()
        await self._client.all_taken()

    def abort(self) -> None:
        """Drop the messages that no consumer has taken, and close without waiting for consumers.

        Consumers raise `PeerLostError` at the end, unless another producer takes the place of this one. Call
        `aclose` afterwards, or leave the block.
        """
        self.affinity.check_place()
        self._is_aborted = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.affinity.is_left_in_child(error):
            self._is_aborted = self._is_aborted or error is not None
            await self.aclose()

    async def aclose(self) -> None:
        """Close the producer after consumers have taken all its messages; waiting calls raise `ClosedError`.

        Cancellation ends the wait, and drops the messages that no consumer has taken. Closing again has no
        effect. The call raises the errors of `put` about earlier messages; the producer is closed
        nevertheless.
        """
        self.affinity.check_place()
        client = self._client
        if not self.affinity.close():
            return
        client._permits.fail_waiting(self.affinity.closed_error)
        client._memory.gate.fail_waiting(self.affinity.closed_error)
        try:
            if not self._is_aborted:
                await client.all_taken()
                if self._slot is not None:
                    self._slot.mark_closed()
        finally:
            client.drop(self.affinity.closed_error())
            await self._stack.aclose()

    def statistics(self) -> ProducerStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        client = self._client
        permits, waiting = client._permits, client._permits.waiting + client._memory.gate.waiting
        return ProducerStatistics(
            permits.limit, permits.in_use, permits.peak, waiting, client.taken, client.redelivered
        )

    def _details(self) -> list[str]:
        details = [f"of {self._settings.folder.path}"]
        if self.affinity.is_open:
            details.append(f"{self._client._permits.in_use} messages not taken")
        return details


class _Client(MessageClient[None]):
    """The client of a producer, whose servers are the consumers.

    A message asks for no answer, and a call returns once the message is in memory. The client sends messages
    that a lost consumer has not taken to another one.

    Args:
        settings: the settings of the queue.

    Attributes:
        taken: the number of messages that consumers have taken.
        redelivered: how often a message was sent again.
    """

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(
            settings.folder.addresses(),
            type(None),
            settings.max_messages,
            settings.arena_bytes,
            grace_s=settings.grace_s,
        )
        self.affinity.has_guardian = True
        self._sends_again = settings.redeliver
        self.taken = self.redelivered = 0
        self._settings = settings
        self._failure: AioTensorError | None = None  # why no further message can be delivered
        self._refusals: deque[AioTensorError] = deque()  # errors to be raised once each

    # Calls

    def put_now(self, box: list[object]) -> None:
        """Place and send the message that a list contains; raise `WouldBlockError` instead of waiting."""
        permit = self._permits.try_request(1)
        if permit is None:
            raise self.full()
        request = self._new_request(permit)
        request.engines = self._engines
        try:
            request.place_now(box)
            self._submit(request)
        except BaseException:
            self._end(request)
            raise

    async def all_taken(self) -> None:
        """Wait until all messages were taken; raise the error of a message that cannot be delivered."""
        self._permits.on_release = self._changes.wake
        await until(lambda: self._failure is not None or not self._permits.in_use or None, self._changes)
        self.check()

    def check(self) -> None:
        """Raise the error of an earlier message that could not be delivered, if there is one."""
        if self._failure is not None:
            raise again(self._failure)
        if self._refusals:
            raise self._refusals.popleft()

    def full(self) -> WouldBlockError:
        """Return the error of a call that cannot wait any longer."""
        permits = self._permits
        if permits.in_use < permits.limit:
            return self._would_block("the message could not be placed in memory in time", 0, 0)
        unopened = "" if self._had_consumer() else ": no consumer of this queue was opened yet"
        return WouldBlockError(
            f"the consumers have not taken the {permits.in_use} earlier messages of this producer, and "
            f"max_messages={permits.limit}{unopened}",
            messages=Usage(permits.limit, permits.in_use, 1),
        )

    def drop(self, error: ClosedError) -> None:
        """Withdraw the messages that no consumer has taken, and end all calls."""
        self._fail(error)
        for engine in self._engines:
            if engine.session is not None:
                for request in engine.session.waiting():
                    self._end(request)

    def _had_consumer(self) -> bool:
        return any(engine.is_admitted or engine.counts["losses"] for engine in self._engines)

    # Overridden methods of the client

    def _submit(self, request: SentRequest) -> None:
        check_body(request.body_bytes, self._settings.max_body_bytes)
        request.ended.set_result(None)  # the call returns, whether or not a consumer has capacity
        super()._submit(request)

    def _hopeless(self, engines: Sequence[object]) -> AioTensorError | None:
        error = super()._hopeless(self._engines)  # messages have no target
        if not isinstance(error, UnavailableError):
            return error
        if not self._had_consumer():
            return None  # the first one may still be loading its model
        return PeerLostError(
            f"no consumer of this queue is open, and none has opened for {self._settings.grace_s:g} s; "
            f"{self._permits.in_use} messages of this producer were not taken"
        )

    def _requeue(self, requests: Sequence[SentRequest]) -> None:
        self.redelivered += len(requests)
        super()._requeue(requests)

    def _took(self, request: SentRequest) -> None:
        self.taken += request.session is not None and request.permit is not None
        super()._took(request)

    def _lose(self, request: SentRequest, error: AioTensorError) -> None:
        super()._took(request)
        self._fail(error)

    def _refused(self, error: AioTensorError) -> None:
        self._refusals.append(error)

    def _fail(self, error: AioTensorError) -> None:
        if self._failure is None:
            self._failure = failure = again(error)
            self._permits.fail(lambda: again(failure))
            self._memory.gate.fail(lambda: again(failure))
            self._changes.wake()
