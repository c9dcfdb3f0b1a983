"""Waits for a budget: `Gate` is a `Budget` with an asyncio future for each queued call."""

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from aiotensor.errors import AioTensorError
from aiotensor.memory.arena import Arena, Extent
from aiotensor.protocol.credits import Budget, Space, Ticket
from aiotensor.runtime import tracing
from aiotensor.statistics.counters import WaitCounter

__all__ = ["Gate", "StuckError", "WaitLimits"]

P = TypeVar("P")


class StuckError(AioTensorError):
    """The wait would never end; the owner of the gate converts this error into a public one."""


class Gate(Budget[P]):
    """A budget for which calls can wait, in order; belongs to the running loop.

    Args:
        limit: the maximum amount in use at once.
        space: the space in which each amount gets a place; None if amounts have no places.
        stuck_elsewhere: called to detect a deadlock; returns the part of the amount in use that is not
            accounted to queued calls, but cannot be released until one of them is granted or ends. None if a
            deadlock is impossible.
        long_wait_s: the time in seconds after which a wait is reported; None for never.
        on_long_wait: called with the amount, once for each wait that reaches this time.
        max_wait_s: the time in seconds after which a wait ends with an error; None for never.
        overdue: called with the amount of such a wait; returns the error to raise.
        step: the name of a wait in traces.

    Attributes:
        waited: counts the ended waits and their durations.
    """

    def __init__(
        self,
        limit: int,
        *,
        space: Space[P] | None = None,
        stuck_elsewhere: Callable[[], int] | None = int,
        long_wait_s: float | None = None,
        on_long_wait: Callable[[int], None] = lambda amount: None,
        max_wait_s: float | None = None,
        overdue: Callable[[int], AioTensorError] = lambda amount: AioTensorError("waited for too long"),
        step: tracing.Step = "wait for memory",
    ) -> None:
        super().__init__(limit, space, time.monotonic)
        self.waited = WaitCounter()
        self._step = step
        self._stuck_elsewhere = stuck_elsewhere
        self._long_wait_s = math.inf if long_wait_s is None else long_wait_s
        self._on_long_wait = on_long_wait
        self._max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self._overdue = overdue
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
            nbytes = amount if self._step == "wait for memory" else 0
            await tracing.step(self._step, future, nbytes)
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
                    self._on_long_wait(ticket.amount)
                if ticket.since + self._max_wait_s <= now and not future.done():
                    future.set_exception(self._overdue(ticket.amount))
        finally:  # the limits of the other waits must hold even if a log handler has raised an error
            self._set_timer()


class WaitLimits(NamedTuple):
    """The limits on the duration of each wait for the permits and the memory of one object.

    Attributes:
        long_wait_s: the time in seconds after which a wait is reported; None for never.
        max_wait_s: the time in seconds after which a wait ends with an error; None for never.
        on_long_wait: called with what a call waits for, once for each wait that reaches `long_wait_s`.
        overdue: called with the reason of a wait that ends, and the numbers of messages and of bytes that the
            call has requested; returns the error to raise.
    """

    long_wait_s: float | None = None
    max_wait_s: float | None = None
    on_long_wait: Callable[[str], None] = lambda what: None
    overdue: Callable[[str, int, int], AioTensorError] = lambda reason, *_: AioTensorError(reason)

    def permits(
        self,
        limit: int,
        what: str = "a permit",
        reason: str = "no permit was free",
        step: tracing.Step = "wait for a permit",
    ) -> Gate[None]:
        """Return a gate for permits; `what` and `reason` describe a wait for one, and `step` names it."""
        return Gate(
            limit,
            stuck_elsewhere=None,
            long_wait_s=self.long_wait_s,
            on_long_wait=lambda _: self.on_long_wait(what),
            max_wait_s=self.max_wait_s,
            overdue=lambda _: self.overdue(reason, 1, 0),
            step=step,
        )

    def memory(self, limit: int, arena: Arena, stuck_elsewhere: Callable[[], int] | None) -> Gate[Extent]:
        """Return a gate for the memory of an arena; see `Gate` for the arguments."""
        return Gate(
            limit,
            space=arena,
            stuck_elsewhere=stuck_elsewhere,
            long_wait_s=self.long_wait_s,
            on_long_wait=lambda nbytes: self.on_long_wait(f"{nbytes} bytes of shared memory"),
            max_wait_s=self.max_wait_s,
            overdue=lambda nbytes: self.overdue("not enough shared memory was free", 0, nbytes),
        )
