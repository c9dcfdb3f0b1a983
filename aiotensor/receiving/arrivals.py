"""The tasks that wait for tensors of one receiver, woken when one may have arrived."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiotensor.errors import AioTensorError, PeerLostError
from aiotensor.protocol.mailbox import Key
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters

__all__ = ["Arrivals", "Limit"]

logger = logger_of("receiver")


class Limit(NamedTuple):
    """The end of a wait: a time by the loop's clock, and the error to raise then."""

    ends_at: float
    make_error: Callable[[], AioTensorError]


class Arrivals:
    """Wake tasks that wait for tensors; belongs to the event loop's thread.

    The connections refer to this object and not to the receiver. So an unused receiver is garbage-collected,
    and a receiver with a waiting task is not.

    Attributes:
        waiters: the calls that wait for the tensor of a key.
    """

    def __init__(self) -> None:
        self.waiters: dict[Key, Waiters] = {}
        self._iterators = Waiters()
        self._loop = asyncio.get_running_loop()
        self._failure: OSError | None = None

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return sum(map(len, self.waiters.values())) + len(self._iterators)

    def change(self) -> "asyncio.Future[None]":
        """Return a future to await, which completes when an iteration may continue, or at the end.

        Raises:
            PeerLostError: no more tensors will arrive.
        """
        if self._failure is not None:
            self.raise_if_failed()
        return self._iterators.wait()

    def arrival(self, key: Key, limit: Limit | None) -> "asyncio.Future[None]":
        """Return a future to await, which completes when a tensor may be here, or at the end.

        Args:
            key: the name of the tensor.
            limit: when to end the wait with an error; None for never.

        Raises:
            PeerLostError: no more tensors will arrive.
        """
        if self._failure is not None:
            self.raise_if_failed()
        waiters = self.waiters.get(key)
        if waiters is None:
            waiters = self.waiters[key] = Waiters()
        arrival = waiters.wait()
        if limit is not None:
            expiry = self._loop.call_at(limit.ends_at, _expire, arrival, limit)
            arrival.add_done_callback(lambda _: expiry.cancel())
        return arrival

    def wake(self, keys: Sequence[Key]) -> None:
        """Wake the calls that wait for these tensors, and the iterations if no call waits for one of them."""
        is_unclaimed = False
        for key in keys:
            waiters = self.waiters.pop(key, None)
            if waiters is None:
                is_unclaimed = True
            else:
                waiters.wake()
        if is_unclaimed and self._iterators:
            self._iterators.wake()

    def give_up(self, key: Key) -> None:
        """Handle that a call ends its wait: an iteration may return the tensor instead."""
        if not self.waiters.get(key, True):
            del self.waiters[key]
        self._iterators.wake()

    def wake_all(self) -> None:
        """Wake every task that waits."""
        for waiters in self.waiters.values():
            waiters.wake()
        self.waiters.clear()
        self._iterators.wake()

    def fail(self, error: OSError) -> None:
        """End all waits because of a system error: no more tensors will arrive."""
        logger.critical(
            "reading from the senders failed, nothing more will arrive",
            exc_info=error,
            extra={"event": "reading_failed", "error": type(error).__name__, "reason": str(error)},
        )
        self._failure = error
        self.wake_all()

    def raise_if_failed(self) -> None:
        """Raise `PeerLostError` if no more tensors will arrive."""
        if self._failure is not None:
            raise PeerLostError(f"nothing more will arrive: {self._failure}") from self._failure


def _expire(arrival: "asyncio.Future[None]", limit: Limit) -> None:
    if not arrival.done():
        arrival.set_exception(limit.make_error())
