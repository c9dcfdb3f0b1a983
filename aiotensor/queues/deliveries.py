"""The messages of a producer, from `put` until a consumer has taken them."""

from collections import deque
from collections.abc import Sequence

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
from aiotensor.queues.settings import QueueSettings
from aiotensor.queues.statistics import ProducerStatistics
from aiotensor.runtime.waiting import Waiters, until
from aiotensor.types import Usage

__all__ = ["Deliveries"]


class Deliveries(MessageClient[None]):
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
        self._awaits_first = True  # whether to wait for the first consumer without limit
        self._waiters = Waiters()  # the calls of `all_taken`

    # Calls

    async def put(self, box: list[object]) -> None:
        """Place the message that a list contains in memory, and send it when a consumer has capacity."""
        await self._place(box, None, None, asks=False)

    def put_now(self, box: list[object]) -> None:
        """Do the same on this thread; raise `WouldBlockError` if that requires a wait."""
        permit = self._permits.try_request(1)
        if permit is None:
            raise self.full()
        request = self._new_request(permit, None, None, asks=False)
        try:
            request.place_now(box)
            self._submit(request)
        except BaseException:
            self._end(request)
            raise

    async def all_taken(self) -> None:
        """Wait until all messages were taken; raise the error of a message that cannot be delivered."""
        self._permits.on_release = self._waiters.wake
        await until(lambda: self._failure is not None or not self._permits.in_use or None, self._waiters)
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

    def totals(self) -> ProducerStatistics:
        """Return the statistics of the producer."""
        permits = self._permits
        waiting = permits.waiting + self._memory.gate.waiting
        return ProducerStatistics(
            permits.limit, permits.in_use, permits.peak, waiting, self.taken, self.redelivered
        )

    def stop_waiting(self, error: ClosedError) -> None:
        """End the calls that wait for a permit or memory."""
        self._permits.fail_waiting(lambda: again(error))
        self._memory.gate.fail_waiting(lambda: again(error))

    def drop(self, error: ClosedError) -> None:
        """Withdraw the messages that no consumer has taken, and end all calls."""
        self._fail(error)
        for engine in self._engines:
            if engine.session is not None:
                for request in engine.session.all_untaken():
                    self._end(request)

    # Consumers

    def expect_no_first_consumer(self) -> None:
        """Wait for the first consumer only as long as for others, from now on: the program ends."""
        self._awaits_first = False
        if not self._had_consumer():
            for engine in self._engines:
                engine.outage.end()
                engine.outage.begin()

    def _had_consumer(self) -> bool:
        return any(engine.is_admitted or engine.counts["losses"] for engine in self._engines)

    # Overridden methods of the client

    def _submit(self, request: SentRequest) -> None:
        check_body(request.body_bytes, self._settings.max_body_bytes)
        request.ended.set_result(None)  # the call returns, whether or not a consumer has capacity
        super()._submit(request)

    def _hopeless(self, target: object) -> AioTensorError | None:
        error = super()._hopeless(None)  # messages have no target
        if not isinstance(error, UnavailableError):
            return error
        if self._awaits_first and not self._had_consumer():
            return None
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
            self._waiters.wake()
