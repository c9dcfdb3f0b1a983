"""A consumer: takes messages from a queue."""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Generic, Self, TypeVar

import msgspec

from aiotensor.channel.server import MessageServer, Request
from aiotensor.errors import AioTensorError, ClosedError, PeerLostError, UsageError, WouldBlockError
from aiotensor.queues.folder import QueueSettings, SlotState
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import seconds
from aiotensor.runtime.outage import Absence
from aiotensor.runtime.waiting import at_most

M = TypeVar("M")

# The messages of one producer that wait in a consumer: the next one, and one that arrives while the producer
# is told that the previous one was taken. With more of them, messages would wait for a busy consumer while
# another one is free.
_MAX_WAITING = 2

# The delays between checks whether the producers have ended. The end of a connection is an event, but the
# kernel may report it before it releases the lock of the process, and a producer may die before it connects.
_FIRST_CHECK_S, _LAST_CHECK_S = 0.01, 1.0

_NO_ANSWER = UsageError("a queue answers no messages")  # producers ask for none


class ConsumerStatistics(msgspec.Struct, frozen=True):
    """The current usage of one consumer, and its totals since it was opened.

    Attributes:
        messages: the messages that have arrived and were not taken.
        taken: the messages that `get` and the iteration have returned.
    """

    messages: int
    taken: int


class QueueConsumer(LoopObject, Generic[M]):
    """Take messages from a queue; made by `MessageQueue.consumer`.

    Open it with ``async with``, and share it between the tasks of that event loop. Each message is taken by
    one consumer. Messages that have arrived but were not taken when the consumer closes or dies are delivered
    to other consumers, or raise `PeerLostError` at their producers if the queue does not redeliver messages.

    ``async for message in consumer`` ends when all producers of the queue have closed, or when this consumer
    is closed.

    A received tensor is a view of shared memory; a small tensor has its own memory. It stays valid after the
    producer and this consumer have ended. Its memory is returned to the producer when its last view is freed,
    so a consumer that keeps tensors delays the producers once they use `arena_bytes`.

    Opening raises `UsageError` if the queue has no free place for a consumer, and `ClosedError` if the queue
    was closed.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.affinity = LoopAffinity("QueueConsumer")
        self._settings = settings
        self._stack = AsyncExitStack()
        self._server: MessageServer[M] | None = None  # None before opening
        self._taken = 0
        self._waiting = 0  # calls of `get`
        self._timer: asyncio.TimerHandle | None = None  # of the next check
        self._absence = Absence(settings.folder.path, self._reason_to_wait)

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        settings, stack = self._settings, self._stack
        try:
            slot = settings.folder.claim("consumer")
            stack.callback(settings.folder.release, slot)
            server: MessageServer[M] = MessageServer(
                settings.folder.addresses()[slot.number],
                settings.message_type,
                arena_bytes=1,  # nothing is answered
                max_clients=None,  # the slots of the queue limit the number of producers
                max_waiting=_MAX_WAITING,
                max_mapped_bytes=None,
                max_body_bytes=settings.max_body_bytes,
            )
            await stack.enter_async_context(server)
            self.affinity.check()  # another task may have closed it in the meantime
        except BaseException:
            self.affinity.close()
            await stack.aclose()
            raise
        self._server = server
        return self

    def _opened(self) -> MessageServer[M]:
        self.affinity.check()
        if self._server is None:
            raise AssertionError("a consumer that is open has its server")
        return self._server

    async def get(self, *, timeout: float | None = None) -> M:
        """Take the next message of any producer, and return it.

        Args:
            timeout: the maximum time in seconds to wait; None for no limit.

        Waits for a message, and while a thread decodes a large one. Cancellation loses no message.

        Raises:
            WouldBlockError: no message arrived within `timeout`.
            ClosedError: all producers have closed, and all their messages were taken; or this consumer was
                closed, perhaps during the call.
            PeerLostError: at least one producer has ended without closing, and the others have closed. Later
                calls wait again if another producer takes its place.
        """
        self._opened()
        if timeout is not None:
            timeout = seconds("timeout", timeout)
        async with at_most(timeout, lambda: self._nothing_within(timeout)):
            return await self._next()

    async def _next(self) -> M:
        while True:
            server = self._opened()
            request = await server._take(waits=False)
            if request is not None:
                return self._take(request)
            self._opened()  # it may have been closed during the decoding of a refused message
            if self._timer is None:
                self._raise_at_end()
            self._check_within(server, _FIRST_CHECK_S)
            self._waiting += 1
            self._absence.begin()
            try:
                await server._takers.wait()
            except asyncio.CancelledError:
                server._takers.wake_one()  # in place of this task, which may have been woken
                raise
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self._absence.end()

    def get_nowait(self) -> M:
        """Take the next message if one has arrived, or raise `WouldBlockError`.

        This thread decodes even a large message. Errors are otherwise those of `get`.
        """
        request = self._opened()._take_now()
        if request is not None:
            return self._take(request)
        self._raise_at_end()
        raise WouldBlockError("no message has arrived in this consumer")

    def _take(self, request: Request[M]) -> M:
        message = request.message
        request._server._fail(request._incoming, _NO_ANSWER)
        self._taken += 1
        return message

    # The end of the queue. All waiting calls share its checks, each of which takes several system calls.

    def _check_within(self, server: MessageServer[M], delay: float) -> None:
        """Check after at most `delay` seconds, and then at growing intervals while calls wait."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay, self._check, server, delay)

    def _check(self, server: MessageServer[M], delay: float) -> None:
        self._timer = None
        if not self._waiting:
            return
        try:
            self._raise_at_end()
        except AioTensorError:
            server._wake()  # each call finds the end itself
        else:
            self._check_within(server, min(2 * delay, _LAST_CHECK_S))

    def _raise_at_end(self) -> None:
        """Raise an error if no producer is open, and none is expected."""
        states = self._settings.folder.producer_states()
        if SlotState.LIVE in states or SlotState.UNUSED in states:
            return
        dead = states.count(SlotState.DEAD)
        if not dead:
            raise ClosedError(
                f"all producers of this queue have closed (producers={len(states)}), and all their messages "
                "were taken"
            )
        raise PeerLostError(
            f"{dead} of the {len(states)} producers of this queue ended without closing: they died, or ended "
            "with an exception, and their messages may be incomplete"
        )

    def _missing_producers(self) -> str:
        """Return the number of producers that were opened, as the end of a text; "" if all were."""
        states = self._settings.folder.producer_states()
        opened = len(states) - states.count(SlotState.UNUSED)
        return f"; producers opened so far: {opened} of {len(states)}" if opened < len(states) else ""

    def _nothing_within(self, timeout: float | None) -> WouldBlockError:
        missing = self._missing_producers()
        return WouldBlockError(f"no message has arrived in this consumer within {timeout:g} s{missing}")

    def _reason_to_wait(self) -> str:
        """Return why calls wait for producers, for the log; "" if they wait for messages only."""
        missing = ""
        with suppress(PeerLostError):  # which the next check finds
            missing = self._missing_producers()
        return missing and f"no message has arrived{missing}. Start the others, or pass their actual number"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> M:
        """Take the next message as `get` does; the iteration ends where `get` raises `ClosedError`."""
        self.affinity.check_place()
        try:
            return await self.get()
        except ClosedError:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Close the consumer; waiting calls raise `ClosedError`, and iterations end.

        Waits at most a second until the producers are notified of the messages that were taken. Cancellation
        ends the wait. Closing again has no effect.
        """
        self.affinity.check_place()
        if self.affinity.close() and self._server is not None:  # None: it is being opened by another task
            if self._timer is not None:
                self._timer.cancel()
            await self._stack.aclose()

    def statistics(self) -> ConsumerStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        waiting = 0 if self._server is None else self._server.statistics().waiting
        return ConsumerStatistics(waiting, self._taken)

    def _details(self) -> list[str]:
        return [f"of {self._settings.folder.path}"]
