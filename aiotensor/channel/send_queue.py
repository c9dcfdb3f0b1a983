"""A queue of messages to one peer, which wait in order until they can be sent."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass

from aiotensor.errors import WouldBlockError
from aiotensor.protocol.parts import Parts
from aiotensor.runtime import tracing
from aiotensor.runtime.waiting import within

__all__ = ["SendQueue", "flush_all"]


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class _Pending:
    """A message that waits to be sent.

    Attributes:
        parts: the parts of the message.
        on_sent: called when the message is sent.
        outcome: completes with True when the message is sent, and with False if it is discarded; None if no
            task waits for it.
    """

    parts: Parts
    on_sent: Callable[[], object] = _nothing
    outcome: "asyncio.Future[bool] | None" = None

    def settle(self, *, was_sent: bool) -> None:
        """Release the message, and end the wait for it."""
        self.parts = ()
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(was_sent)


class SendQueue:
    """Send messages in order; belongs to the running loop.

    Args:
        send: passes a message to ZeroMQ, and returns whether ZeroMQ accepted it; the second argument is
            whether this is a retry.
        wait_limit: returns a context manager that limits the wait of `put`.
    """

    def __init__(
        self,
        send: Callable[[Parts, bool], bool],
        wait_limit: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._send = send
        self._wait_limit = wait_limit
        self._pending: deque[_Pending] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._pending)

    def post(self, parts: Parts) -> None:
        """Send a message, or queue it until it can be sent."""
        if self._pending or not self._send(parts, False):
            self._pending.append(_Pending(parts))

    async def put(self, parts: Parts, on_sent: Callable[[], object] = _nothing) -> bool:
        """Send a message, and wait until it is sent; return False if the peer disconnects first.

        Cancellation removes the message if it has not been sent.

        Args:
            parts: the parts of the message.
            on_sent: called when the message is sent.

        Raises:
            OSError: this process lacks the descriptors or threads to send the message.
            AioTensorError: the wait exceeded the limit of `wait_limit`.
        """
        if not self._pending and self._send(parts, False):
            on_sent()
            return True
        if self._is_closed:  # sending may have found that the peer is gone
            return False
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        pending = _Pending(parts, on_sent, outcome)
        self._pending.append(pending)
        try:
            return await tracing.step("wait for credit", within(self._wait_limit(), outcome))
        except BaseException as error:
            pending.parts = parts = ()  # the error's traceback refers to this frame
            with suppress(ValueError):  # sent or cleared in this iteration of the loop
                self._pending.remove(pending)
            if isinstance(error, WouldBlockError) and outcome.done() and not outcome.cancelled():
                return outcome.result()  # the wait ended in the iteration in which it timed out
            raise

    def flush(self, *, is_retry: bool) -> bool:
        """Send waiting messages until one cannot be sent; return whether any was sent."""
        before = len(self._pending)
        while self._pending:
            pending = self._pending[0]
            if pending.outcome is not None and pending.outcome.done():
                # The waiting task was cancelled in this iteration: its message must not be sent.
                self._pending.popleft()
                continue
            try:
                if not self._send(pending.parts, is_retry):
                    break
            except OSError as error:
                self._pending.popleft()
                if pending.outcome is None:
                    raise
                pending.outcome.set_exception(error)
                continue
            # Sending may find that the peer is gone, which clears the queue.
            if self._pending and self._pending[0] is pending:
                self._pending.popleft()
                pending.on_sent()
                pending.settle(was_sent=True)
        return len(self._pending) < before

    def clear(self) -> None:
        """Discard the waiting messages, because the peer is gone."""
        discarded, self._pending = self._pending, deque()
        for pending in discarded:
            pending.settle(was_sent=False)

    def close(self) -> None:
        """End the waits of `put`; messages of `post` are still sent, even if they are posted later."""
        self._is_closed = True
        for pending in self._pending:
            if pending.outcome is not None:
                pending.settle(was_sent=False)
        self._pending = deque(pending for pending in self._pending if pending.outcome is None)


def flush_all(queues: Callable[[], list[SendQueue]]) -> None:
    """Send the waiting messages of all queues, as far as ZeroMQ accepts them.

    An attempt to send may consume ZeroMQ's signal that another peer is writable, which is not repeated. So
    the queues are flushed until no message was sent in two rounds in a row.
    """
    idle = 0
    while idle < 2 and (waiting := queues()):
        has_sent = [queue.flush(is_retry=True) for queue in waiting]
        idle = 0 if any(has_sent) else idle + 1
