"""A consumer: takes messages from a queue."""

import asyncio
import math
from contextlib import AsyncExitStack
from typing import Generic, Self, TypeVar

import msgspec

from aiotensor.channel.server import MessageServer, changed, receive_now, receive_ready, wake
from aiotensor.errors import AioTensorError, ClosedError, PeerLostError, WouldBlockError, again
from aiotensor.queues.folder import Kind, SlotState
from aiotensor.queues.settings import QueueSettings
from aiotensor.queues.statistics import ConsumerStatistics
from aiotensor.receiver import TensorReceiver
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import seconds
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import at_most

__all__ = ["QueueConsumer"]

logger = logger_of("queues")

M = TypeVar("M")

# The messages of one producer that wait in a consumer. With more of them, messages would wait for a busy
# consumer while another one is free, and one message could overtake another.
_MAX_WAITING = 1

# The delays between checks whether the producers have ended. The end of a connection is an event, but the
# kernel may report it before it releases the lock of the process, and a producer may die before it connects.
_FIRST_CHECK_S, _LAST_CHECK_S = 0.01, 1.0

# A wait of this duration is logged if producers have not been opened.
_LONG_WAIT_S = 10.0

_TAKEN = (msgspec.msgpack.encode(None),)  # the answer to each message


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
        self._has_reported = False  # that producers have not been opened
        self._waiting = 0  # calls of `get`
        self._waiting_since = 0.0  # since then, no message has arrived
        self._taken_before = 0  # the messages taken before that
        self._end: AioTensorError | None = None  # found by the last check
        self._looked_at = -math.inf  # the time of that check
        self._timer: asyncio.TimerHandle | None = None  # of the next check

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            server = await self._open()
            self.affinity.check()  # another task may have closed it in the meantime
        except BaseException:
            self.affinity.close()
            await self._stack.aclose()
            raise
        self._server = server
        return self

    async def _open(self) -> MessageServer[M]:
        folder = self._settings.folder
        slot = folder.claim(Kind.CONSUMER)
        self._stack.callback(folder.release, slot)
        self._stack.callback(slot.mark_closed)
        address = folder.address(slot.number)
        # The slots of the queue limit the number of producers.
        receiver = TensorReceiver(
            address, max_senders=None, max_mapped_bytes=None, max_unclaimed_messages=None
        )
        server: MessageServer[M] = MessageServer(
            address,
            self._settings.message_type,
            receiver=await self._stack.enter_async_context(receiver),
            max_clients=None,
            max_waiting=_MAX_WAITING,
            max_part_bytes=None,
            max_body_bytes=self._settings.max_body_bytes,
        )
        return await self._stack.enter_async_context(server)

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
        if self._end is not None:
            self._looked_at = -math.inf  # a new producer may have claimed the slot of a dead one
        self._waiting += 1
        try:
            while True:
                for message in await receive_ready(self._opened(), _TAKEN):
                    self._taken += 1
                    return message
                server = self._opened()  # it may have been closed during the decoding of a refused message
                self._raise_at_end()
                self._check_within(_FIRST_CHECK_S)
                await changed(server)
        finally:
            self._waiting -= 1

    def get_nowait(self) -> M:
        """Take the next message if one has arrived, or raise `WouldBlockError`.

        This thread decodes even a large message. Errors are otherwise those of `get`.
        """
        for message in receive_now(self._opened(), _TAKEN):
            self._taken += 1
            return message
        self._looked_at = -math.inf
        self._raise_at_end()
        raise WouldBlockError("no message has arrived in this consumer")

    # The end of the queue. All waiting calls share its checks, each of which takes several system calls.

    def _raise_at_end(self) -> None:
        """Raise an error if no producer was open, and none was expected, at the last check."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= _FIRST_CHECK_S:
            self._looked_at, self._end = now, self._end_of_queue()
        if self._end is not None:
            raise again(self._end)

    def _check_within(self, delay: float) -> None:
        """Check after at most `delay` seconds, and then at growing intervals while calls wait."""
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._waiting_since = loop.time()
        elif self._timer.when() > loop.time() + delay:
            self._timer.cancel()
        else:
            return
        self._timer = loop.call_later(delay, self._check, delay)

    def _check(self, delay: float) -> None:
        self._timer = None
        if self._server is None or not (self._waiting and self.affinity.is_open):
            return
        self._looked_at = -math.inf
        try:
            self._raise_at_end()
        except AioTensorError:
            wake(self._server)
            return
        loop = asyncio.get_running_loop()
        if self._taken != self._taken_before:
            self._taken_before, self._waiting_since = self._taken, loop.time()
        elif loop.time() - self._waiting_since >= _LONG_WAIT_S:
            self._report_missing_producers()
        delay = min(2 * delay, _LAST_CHECK_S)
        self._timer = loop.call_later(delay, self._check, delay)

    def _end_of_queue(self) -> AioTensorError | None:
        try:
            states = self._settings.folder.states_in_use(Kind.PRODUCER)
        except PeerLostError as error:
            return error
        if SlotState.LIVE in states or SlotState.UNUSED in states:
            return None
        dead = states.count(SlotState.DEAD)
        if not dead:
            return ClosedError(
                f"all producers of this queue have closed (producers={len(states)}), and all their messages "
                "were taken"
            )
        return PeerLostError(
            f"{dead} of the {len(states)} producers of this queue ended without closing: they died, or ended "
            "with an exception, and their messages may be incomplete"
        )

    def _missing_producers(self) -> str:
        """Return the number of producers that were opened, as the end of a text; "" if all were."""
        states = self._settings.folder.states_in_use(Kind.PRODUCER)
        opened = len(states) - states.count(SlotState.UNUSED)
        return f"; producers opened so far: {opened} of {len(states)}" if opened < len(states) else ""

    def _nothing_within(self, timeout: float | None) -> WouldBlockError:
        missing = self._missing_producers()
        return WouldBlockError(f"no message has arrived in this consumer within {timeout:g} s{missing}")

    def _report_missing_producers(self) -> None:
        """Log once that producers have not been opened: the queue may be for fewer of them."""
        missing = "" if self._has_reported else self._missing_producers()
        if missing:
            self._has_reported = True
            path = self._settings.folder.path
            logger.warning(
                "a consumer of the queue in %s has waited for %s s%s. Start the others, or pass their actual "
                "number to MessageQueue",
                path,
                _LONG_WAIT_S,
                missing,
                extra={"event": "producers_missing", "address": path},
            )

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
