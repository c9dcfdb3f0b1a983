"""A budget of permits or bytes, granted in the order of the requests; it decides, and never waits.

    request --fits, and the queue is empty--> granted --release--> (ended)
       |                                         ^
       '--otherwise--> queued -------------------'  as soon as it is the first and fits
                          |
                          '--release--> (ended)

The first request in the queue blocks all others, so small requests never starve a large one. A granted amount
belongs to its *holder* until it is released or settled. A budget can therefore detect that it is *stuck*: the
whole amount in use belongs to holders that wait for more.

A budget over a *space* also grants a place in it: a request fits only if the space has a free place of its
size.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import msgspec

P = TypeVar("P")


class Space(Protocol[P]):
    """The interface of a space in which each amount has one contiguous place."""

    def allocate(self, amount: int) -> P | None:
        """Allocate a place; None if no free place is large enough."""

    def free(self, place: P) -> None:
        """Free an allocated place."""


class Ticket(msgspec.Struct, Generic[P], eq=False):
    """One request to a budget, with its place if it was granted."""

    amount: int
    holder: Hashable
    since: float  # the time of the request, or of the grant once it is granted
    granted: bool = False
    place: P | None = None


class Budget(Generic[P]):
    """Count the amount in use, and queue the requests that exceed the limit.

    Args:
        limit: the maximum amount in use at once, in any unit.
        space: the space of the amounts; None if they have no places.
        now: returns the current time in seconds.

    Attributes:
        limit: the argument.
        in_use: the granted amount.
        peak: the largest amount that was in use at once.
        held: the amount of each holder that is not settled.
        on_release: called after each `release`; None for no call, which costs less.
    """

    def __init__(self, limit: int, space: Space[P] | None = None, now: Callable[[], float] = float) -> None:
        self.limit = limit
        self.in_use = 0
        self.peak = 0
        self._space = space
        self._now = now
        self._queue: deque[Ticket[P]] = deque()
        self.held: dict[Hashable, int] = {}
        self.on_release: Callable[[], None] | None = None

    @property
    def waiting(self) -> int:
        """The number of queued requests."""
        return len(self._queue)

    def request(self, amount: int, holder: Hashable = None) -> Ticket[P]:
        """Request an amount, and return the ticket, whose `granted` is False if the request was queued.

        Args:
            amount: the amount, at most the limit.
            holder: the holder of the amount until it is settled; None if the amount will be released
                regardless of other requests.

        Raises:
            ValueError: the amount is negative, or exceeds the limit.
        """
        if not 0 <= amount <= self.limit:
            raise ValueError(f"amount must be between 0 and the limit of {self.limit}, got {amount}")
        ticket: Ticket[P] = Ticket(amount, holder, self._now())
        if self._queue or not self._grant(ticket):
            self._queue.append(ticket)
        return ticket

    def try_request(self, amount: int, holder: Hashable = None) -> Ticket[P] | None:
        """Grant an amount if it fits and the queue is empty; return None otherwise.

        Raises:
            ValueError: the amount is negative.
        """
        if amount < 0:
            raise ValueError(f"amount must not be negative, got {amount}")
        if self._queue or self.in_use + amount > self.limit:
            return None
        place = None
        if self._space is not None and amount:
            place = self._space.allocate(amount)
            if place is None:
                return None
        self.in_use += amount  # as `_grant`, without a call
        if self.in_use > self.peak:
            self.peak = self.in_use
        if holder is not None and amount:
            self.held[holder] = self.held.get(holder, 0) + amount
        return Ticket(amount, holder, self._now(), granted=True, place=place)

    def release(self, ticket: Ticket[P]) -> list[Ticket[P]]:
        """End a request, granted or not, and return the tickets that are granted as a result, in order."""
        if not ticket.granted:
            self._queue.remove(ticket)
        else:
            ticket.granted = False
            self.in_use -= ticket.amount
            if ticket.holder in self.held:
                self._unhold(ticket)
            if self._space is not None and ticket.place is not None:
                self._space.free(ticket.place)
        granted: list[Ticket[P]] = []
        if self._queue:
            while self._queue and self._grant(self._queue[0]):
                granted.append(self._queue.popleft())
            self.queue_changed(granted)
        if self.on_release is not None:
            self.on_release()
        return granted

    def queue_changed(self, granted: list[Ticket[P]]) -> None:
        """Handle a release while requests were queued, some of which may be granted; for derived classes."""

    def reassign(self, ticket: Ticket[P], holder: Hashable) -> None:
        """Assign a granted amount to another holder; None as in `request`."""
        if ticket.holder is not None:
            self._unhold(ticket)
        ticket.holder = holder
        if holder is not None and ticket.amount:
            self.held[holder] = self.held.get(holder, 0) + ticket.amount

    def settle(self, holder: Hashable) -> None:
        """Record that the amounts of a holder will be released regardless of other requests."""
        self.held.pop(holder, None)

    def stuck(self, elsewhere: int = 0) -> Ticket[P] | None:
        """Return the request to refuse because the budget is stuck; None if it is not.

        A budget is stuck if requests are queued and the whole amount in use belongs to holders of queued
        requests: then no holder can continue and release its amount. The request to refuse is the last one
        in the queue whose holder holds an amount, or else the last one with a holder.

        Args:
            elsewhere: the part of the amount in use that belongs to no holder of a queued request, but will
                also not be released before a queued request is granted or ends.
        """
        if not self._queue or not (self.held or elsewhere):
            return None
        waiting = {ticket.holder for ticket in self._queue if ticket.holder is not None}
        if sum(self.held.get(holder, 0) for holder in waiting) + elsewhere < self.in_use:
            return None
        latest = [ticket for ticket in reversed(self._queue) if ticket.holder is not None]
        return next((ticket for ticket in latest if ticket.holder in self.held), next(iter(latest), None))

    def _grant(self, ticket: Ticket[P]) -> bool:
        if self.in_use + ticket.amount > self.limit:
            return False
        if self._space is not None and ticket.amount:
            ticket.place = self._space.allocate(ticket.amount)
            if ticket.place is None:
                return False
        ticket.granted = True
        ticket.since = self._now()
        self.in_use += ticket.amount
        if self.in_use > self.peak:
            self.peak = self.in_use
        if ticket.holder is not None and ticket.amount:
            self.held[ticket.holder] = self.held.get(ticket.holder, 0) + ticket.amount
        return True

    def _unhold(self, ticket: Ticket[P]) -> None:
        remaining = self.held.get(ticket.holder, 0) - ticket.amount
        if remaining > 0:
            self.held[ticket.holder] = remaining
        else:
            self.held.pop(ticket.holder, None)
