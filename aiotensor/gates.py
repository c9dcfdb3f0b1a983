"""Waiting: for something to change, and for a budget. The futures around the pure rooms."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from aiotensor.errors import AioTensorError
from aiotensor.protocol.credits import Budget, Space, Ticket
from aiotensor.tally import WaitTally

__all__ = ["Gate", "StuckError", "Waiters"]

P = TypeVar("P")


class StuckError(AioTensorError):
    """Waiting would never end; the sender turns it into what users see."""


class Waiters(list["asyncio.Future[None]"]):
    """Those who wait until something may have changed; each looks for itself when woken.

    What woke them stays where it is until somebody takes it without an await, so a cancelled waiter
    loses nothing.
    """

    async def wait(self) -> None:
        """Wait until the next `wake`."""
        future = asyncio.get_running_loop().create_future()
        self.append(future)
        try:
            await future
        finally:
            self.remove(future)

    def wake(self) -> None:
        """Wake all, in the order in which they came."""
        for future in self:
            if not future.done():
                future.set_result(None)


class Gate(Generic[P]):
    """Let callers wait for a budget, in order, and give back what a cancelled one had.

    Args:
        limit: the most that can be in use at once.
        space: where amounts lie, if they lie anywhere.
        stuck_elsewhere: says how much of what is in use, outside the line, will never come back unless
            somebody in the line goes on or gives up; None if nobody here can ever be stuck.
        long_wait_s: after how many seconds a wait is reported; None for never.
        on_long_wait: called with the amount, once for each wait that lasts so long.
    """

    def __init__(
        self,
        limit: int,
        *,
        space: Space[P] | None = None,
        stuck_elsewhere: Callable[[], int] | None = int,
        long_wait_s: float | None = None,
        on_long_wait: Callable[[int], None] = lambda amount: None,
    ) -> None:
        self.budget: Budget[P] = Budget(limit, space)
        self.waited = WaitTally()
        self._stuck_elsewhere = stuck_elsewhere
        self._long_wait_s = long_wait_s
        self._on_long_wait = on_long_wait
        self._waits: dict[Ticket[P], asyncio.Future[None]] = {}  # the longest first
        self._reported: set[Ticket[P]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._failure: Callable[[], AioTensorError] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def longest_wait_s(self, now: float) -> float:
        """Return the seconds that the longest of the present waits has lasted, by the loop's clock."""
        return now - next((ticket.since for ticket in self._waits), now)

    async def acquire(self, amount: int, holder: Hashable = None) -> Ticket[P]:
        """Wait until the amount is granted, and return the ticket to give back.

        Cancelling leaves the line, or gives back what was granted in the same moment.

        Raises:
            StuckError: everything in use is held by holders that wait, this one among them.
            AioTensorError: what `fail` or `fail_waiting` was given makes.
        """
        if self._failure is not None:
            raise self._failure()
        loop = self._home()
        ticket = self.budget.request(amount, holder)
        ticket.since = loop.time()
        if ticket.granted:
            return ticket
        future = self._waits[ticket] = loop.create_future()
        if self._alarm is None:
            self._set_alarm()
        if self._stuck_elsewhere is not None:
            self.refuse_if_stuck()
        try:
            await future
            if self._failure is not None:  # since the grant, in the very same turn of the loop
                raise self._failure()
        except BaseException:
            # Cancelled, refused or failed, perhaps in the very turn of the grant.
            self.release(ticket)
            raise
        finally:
            self.waited.add(loop.time() - ticket.since)
            del self._waits[ticket]
            self._reported.discard(ticket)
            # It has the error, whose traceback has this frame, and those of the callers with their tensors.
            del future
        ticket.since = loop.time()
        return ticket

    def try_acquire(self, amount: int, holder: Hashable = None) -> Ticket[P] | None:
        """Take the amount if it is free and nobody waits in line."""
        ticket = self.budget.try_request(amount, holder)
        if ticket is not None:
            ticket.since = self._home().time()
        return ticket

    def release(self, ticket: Ticket[P]) -> None:
        """Give back what was granted, or leave the line, and wake whoever that lets through."""
        granted = self.budget.release(ticket)
        if self._waits:
            self._wake(granted)

    def fail(self, make_error: Callable[[], AioTensorError]) -> None:
        """End every wait with an error of its own, those that begin later too."""
        self._failure = make_error
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self.fail_waiting(make_error)

    def fail_waiting(self, make_error: Callable[[], AioTensorError]) -> None:
        """End every present wait with an error of its own."""
        for future in self._waits.values():
            if not future.done():
                future.set_exception(make_error())

    def refuse_if_stuck(self) -> None:
        """End the latest wait if nothing else could ever end one."""
        if self._stuck_elsewhere is None:
            return
        ticket = self.budget.stuck(self._stuck_elsewhere())
        future = self._waits.get(ticket) if ticket is not None else None
        if future is not None and not future.done():
            future.set_exception(StuckError("everything in use is held by those who wait"))

    def _wake(self, granted: list[Ticket[P]]) -> None:
        for ticket in granted:
            future = self._waits.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)
        if self._stuck_elsewhere is not None:
            self.refuse_if_stuck()

    def _home(self) -> asyncio.AbstractEventLoop:
        # Asked for once: finding out asks the kernel, each time, for the number of this process.
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _set_alarm(self) -> None:
        """Have the next long wait reported: one timer for all, since most waits are short."""
        if self._long_wait_s is None or self._failure is not None:
            return
        first = next((ticket.since for ticket in self._waits if ticket not in self._reported), None)
        if first is not None:
            self._alarm = self._home().call_at(first + self._long_wait_s, self._report, self._long_wait_s)

    def _report(self, long_wait_s: float) -> None:
        self._alarm = None
        now = self._home().time()
        for ticket, future in list(self._waits.items()):
            if now >= ticket.since + long_wait_s and not (ticket in self._reported or future.done()):
                self._reported.add(ticket)
                self._on_long_wait(ticket.amount)
        self._set_alarm()
