"""Waiting: for something to change, and for a budget. The futures around the pure rooms."""

import asyncio
from collections.abc import Callable, Hashable

from aiotensor.errors import AioTensorError
from aiotensor.protocol.credits import Budget, Ticket

__all__ = ["Gate", "StuckError", "Waiters"]


class StuckError(AioTensorError):
    """Waiting would never end; the sender turns it into what users see."""


class Waiters:
    """Those who wait until something may have changed; each looks for itself when woken.

    What woke them stays where it is until somebody takes it without an await, so a cancelled waiter
    loses nothing.
    """

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self) -> None:
        """Wait until the next `wake`."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        try:
            await future
        finally:
            self._futures.remove(future)

    def wake(self) -> None:
        """Wake all, in the order in which they came."""
        for future in self._futures:
            if not future.done():
                future.set_result(None)


class Gate:
    """Let callers wait for a budget, in order, and give back what a cancelled one had.

    Args:
        limit: the most that can be in use at once.
        stuck_elsewhere: says how much of what is in use, outside the line, will never come back unless
            somebody in the line goes on or gives up.
    """

    def __init__(self, limit: int, stuck_elsewhere: Callable[[], int] = int) -> None:
        self.budget = Budget(limit)
        self._stuck_elsewhere = stuck_elsewhere
        self._futures: dict[Ticket, asyncio.Future[None]] = {}
        self._failure: Callable[[], AioTensorError] | None = None

    async def acquire(self, amount: int, holder: Hashable = None) -> None:
        """Wait until the amount is granted.

        Cancelling leaves the line, or gives back what was granted in the same moment.

        Raises:
            StuckError: everything in use is held by holders that wait, this one among them.
            AioTensorError: what `fail` was given makes.
        """
        if self._failure is not None:
            raise self._failure()
        ticket = self.budget.request(amount, holder)
        if ticket.granted:
            return
        future = asyncio.get_running_loop().create_future()
        self._futures[ticket] = future
        self.refuse_if_stuck()
        try:
            await future
            if self._failure is not None:  # since the grant, in the very same turn of the loop
                raise self._failure()
        except BaseException:
            # Cancelled, refused or failed, perhaps in the very turn of the grant.
            self._wake(self.budget.withdraw(ticket))
            raise
        finally:
            self._futures.pop(ticket, None)

    def try_acquire(self, amount: int, holder: Hashable = None) -> bool:
        """Take the amount if it is free and nobody waits in line."""
        return self.budget.try_request(amount, holder)

    def release(self, amount: int, holder: Hashable = None) -> None:
        """Give an amount back and wake whoever that lets through."""
        self._wake(self.budget.release(amount, holder))

    def fail(self, make_error: Callable[[], AioTensorError]) -> None:
        """End every wait with an error of its own, those that begin later too."""
        self._failure = make_error
        for future in self._futures.values():
            if not future.done():
                future.set_exception(make_error())

    def refuse_if_stuck(self) -> None:
        """End the latest wait if nothing else could ever end one."""
        ticket = self.budget.stuck(self._stuck_elsewhere())
        future = self._futures.get(ticket) if ticket is not None else None
        if future is not None and not future.done():
            future.set_exception(StuckError("everything in use is held by those who wait"))

    def _wake(self, granted: list[Ticket]) -> None:
        for ticket in granted:
            future = self._futures.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)
        self.refuse_if_stuck()
