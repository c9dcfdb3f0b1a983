"""The futures of the calls and iterations that wait for tensors of one receiver."""

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
    """The time limit of a wait.

    Attributes:
        ends_at: the time at which the wait ends, in seconds by the clock of the event loop.
        make_error: called at that time; returns the error that the waiting call raises.
    """

    ends_at: float
    make_error: Callable[[], AioTensorError]


class Arrivals:
    """Wake the calls and iterations that wait for tensors; belongs to the running loop.

    The connections, to which the event loop refers, refer to this object and not to the receiver, so an
    unused receiver is garbage-collected. A future of this object refers to the task that awaits it, so a
    receiver with a waiting task is kept alive.

    Attributes:
        waiters: the futures of the calls that wait for a tensor, by the key of the tensor.
        iterators: the futures of the iterations that wait for any tensor; each tensor wakes one of them.
    """

    def __init__(self) -> None:
        self.waiters: dict[Key, Waiters] = {}
        self.iterators = Waiters()
        self._loop = asyncio.get_running_loop()
        self._failure: OSError | None = None

    @property
    def waiting(self) -> int:
        """The number of waiting calls and iterations."""
        return sum(map(len, self.waiters.values())) + len(self.iterators)

    def change(self) -> "asyncio.Future[None]":
        """Return a future to await, which completes when an iteration must check the mailbox again.

        Raises:
            PeerLostError: reading from the senders has failed, so no more tensors will arrive.
        """
        if self._failure is not None:
            self.raise_if_failed()
        return self.iterators.wait()

    def arrival(self, key: Key, limit: Limit | None) -> "asyncio.Future[None]":
        """Return a future to await, which completes when a call must check the mailbox for its tensor again.

        Args:
            key: the key of the tensor.
            limit: the time limit, at which the future raises an error; None for no limit.

        Raises:
            PeerLostError: reading from the senders has failed, so no more tensors will arrive.
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
        """Wake the calls that wait for these tensors, and an iteration for each tensor without one."""
        for key in keys:
            waiters = self.waiters.pop(key, None)
            if waiters is not None:
                waiters.wake()
            elif self.iterators:
                self.iterators.wake_one()

    def give_up(self, key: Key) -> None:
        """Wake an iteration after a call has given up its tensor, since it may return the tensor instead."""
        if not self.waiters.get(key, True):
            del self.waiters[key]
        self.iterators.wake_one()

    def wake_all(self) -> None:
        """Wake all waiting calls and iterations."""
        for waiters in self.waiters.values():
            waiters.wake()
        self.waiters.clear()
        self.iterators.wake()

    def fail(self, error: OSError) -> None:
        """End all waits, because reading from the senders has failed and no more tensors will arrive."""
        logger.critical(
            "reading from the senders failed; no more tensors will arrive",
            exc_info=error,
            extra={"event": "reading_failed", "error": type(error).__name__, "reason": str(error)},
        )
        self._failure = error
        self.wake_all()

    def raise_if_failed(self) -> None:
        """Raise `PeerLostError` if `fail` was called, so that no more tensors will arrive."""
        if self._failure is not None:
            raise PeerLostError(f"no more tensors will arrive: {self._failure}") from self._failure


def _expire(arrival: "asyncio.Future[None]", limit: Limit) -> None:
    if not arrival.done():
        arrival.set_exception(limit.make_error())
