"""Waits for a budget: `Gate` is a `Budget` with an asyncio future for each queued call."""

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from aiotensor.errors import AioTensorError
from aiotensor.protocol.credits import Budget, Space, Ticket
from aiotensor.runtime import tracing
from aiotensor.statistics.counters import WaitCounter

P = TypeVar("P")


class StuckError(AioTensorError):
    """The wait would never end; the owner of the gate converts this error into a public one."""


class WaitLimits(NamedTuple):
    """The limits on the duration of each wait for the permits and the memory of one object.

    Attributes:
        long_wait_s: the time in seconds after which a wait is reported; None for never.
        max_wait_s: the time in seconds after which a wait ends with an error; None for never.
        on_long_wait: called with the resource of a wait, once for each wait that reaches `long_wait_s`.
        overdue: called with the reason of a wait that ends, and the numbers of messages and of bytes that the
            call has requested; returns the error to raise.
    """

    long_wait_s: float | None = None
    max_wait_s: float | None = None
    on_long_wait: Callable[[str], None] = lambda what: None
    overdue: Callable[[str, int, int], AioTensorError] = lambda reason, *_: AioTensorError(reason)


class Gate(Budget[P]):
    """A budget of permits, or of bytes of memory, for which calls wait in order; belongs to the running loop.

    Args:
        limit: the maximum amount in use at once.
        limits: the limits on waits.
        space: the space in which each amount of bytes gets a place; None for permits.
        stuck_elsewhere: called to detect a deadlock; returns the part of the amount in use that is not
            accounted to queued calls, but cannot be released until one of them is granted or ends. None if a
            deadlock is impossible.
        what: what a call waits for, in the report of a long wait.
        reason: why a call has waited, in the error of a wait that ends.
        step: the name of a wait in traces.

    Attributes:
        waited: counts the ended waits and their durations.
    """

    def __init__(
        self,
        limit: int,
        limits: WaitLimits = WaitLimits(),  # noqa: B008 - it is immutable
        *,
        space: Space[P] | None = None,
        stuck_elsewhere: Callable[[], int] | None = None,
        what: str = "a permit",
        reason: str = "no permit was free",
        step: tracing.Step = "wait for a permit",
    ) -> None:
        super().__init__(limit, space, time.monotonic)
        self.waited = WaitCounter()
        self._limits = limits
        self._stuck_elsewhere = stuck_elsewhere
        self._what, self._reason, self._step = what, reason, step
        self._long_wait_s = math.inf if limits.long_wait_s is None else limits.long_wait_s
        self._max_wait_s = math.inf if limits.max_wait_s is None else limits.max_wait_s
        self._waits: dict[Ticket[P], asyncio.Future[None]] = {}  # the longest wait first
        self._timer: asyncio.TimerHandle | None = None  # one for all waits, because most of them are short
        self._timer_at = math.inf
        self._checked_at = -math.inf  # when the timer last expired
        self._failure: Callable[[], Exception] | None = None

    def longest_wait_s(self) -> float:
        """Return the duration of the longest current wait in seconds."""
        now = time.monotonic()
        return now - next((ticket.since for ticket in self._waits if not ticket.granted), now)

    async def acquire(self, amount: int, holder: Hashable = None) -> Ticket[P]:
        """Wait until the amount is granted, and return the ticket to release later.

        Cancellation removes the call from the queue, or releases an amount that was granted in the meantime.

        Raises:
            StuckError: everything in use belongs to holders that wait for more, so no wait would ever end.
            Exception: the error from the callback of `fail` or `fail_waiting`, or from `overdue`.
        """
        if self._failure is not None:
            raise self._failure()
        ticket = self.request(amount, holder)
        if ticket.granted:
            return ticket
        since = ticket.since
        future = self._waits[ticket] = asyncio.get_running_loop().create_future()
        if self._next_limit(ticket) < self._timer_at:
            self._set_timer()
        self.refuse_if_stuck()
        try:
            await tracing.step(self._step, future, 0 if self._space is None else amount)
            if self._failure is not None:  # set after the grant, in the same iteration of the loop
                raise self._failure()
        except BaseException:
            # Cancelled, refused or failed, possibly in the same iteration as the grant.
            self.release(ticket)
            raise
        finally:
            self.waited.add(time.monotonic() - since)
            del self._waits[ticket]
            # The future refers to the error, whose traceback would keep this frame and the frames of the
            # callers alive, with their tensors.
            del future
        return ticket

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """End every current and future wait, each with a new error from `make_error`."""
        self._failure = make_error
        if self._timer is not None:
            self._timer.cancel()
        self.fail_waiting(make_error)

    def fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        """End every current wait, each with a new error from `make_error`."""
        for future in self._waits.values():
            if not future.done():
                future.set_exception(make_error())

    def refuse_if_stuck(self) -> None:
        """End one wait with `StuckError` if otherwise no wait could ever end."""
        if self._stuck_elsewhere is None or not self._waits:
            return
        ticket = self.stuck(self._stuck_elsewhere())
        future = self._waits.get(ticket) if ticket is not None else None
        if future is not None and not future.done():
            future.set_exception(StuckError("all resources in use are held by waiting calls"))

    def queue_changed(self, granted: list[Ticket[P]]) -> None:
        """Wake the calls that were granted their amounts, or refuse one of the others."""
        for ticket in granted:
            future = self._waits.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)
        self.refuse_if_stuck()

    def _next_limit(self, ticket: Ticket[P]) -> float:
        """Return the next time at which a wait is to be reported or ended, by `time.monotonic`."""
        reported_at = ticket.since + self._long_wait_s
        ended_at = ticket.since + self._max_wait_s
        return reported_at if self._checked_at < reported_at < ended_at else ended_at

    def _set_timer(self) -> None:
        """Set the timer for the next time at which any wait is to be reported or ended."""
        if self._timer is not None:
            self._timer.cancel()
        times = (self._next_limit(ticket) for ticket, future in self._waits.items() if not future.done())
        self._timer_at = min(times, default=math.inf)
        self._timer = None
        if self._timer_at < math.inf:
            delay = max(0.0, self._timer_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._check_limits)

    def _check_limits(self) -> None:
        """Report and end the waits that have reached a limit since the last check."""
        checked_at, now = self._checked_at, time.monotonic()
        self._checked_at = now
        try:
            for ticket, future in list(self._waits.items()):
                if checked_at < ticket.since + self._long_wait_s <= now and not future.done():
                    nbytes = f"{ticket.amount} bytes of "
                    self._limits.on_long_wait(self._what if self._space is None else nbytes + self._what)
                if ticket.since + self._max_wait_s <= now and not future.done():
                    amounts = (ticket.amount, 0) if self._space is None else (0, ticket.amount)
                    future.set_exception(self._limits.overdue(self._reason, *amounts))
        finally:  # the limits of the other waits must hold even if a log handler has raised an error
            self._set_timer()
