"""A budget of permits or bytes, granted first come first served. It decides; it never waits.

    request --fits and nobody waits--> granted --release--> (gone)
       |                                  ^
       '--else--> waiting ----------------'  as soon as it is first in line and fits
                     |
                     '--release--> (gone)

Whoever is first in line blocks everybody behind: a big request is never starved by small ones. What is
granted belongs to its *holder* until it is released or settled, so that a budget can see when it is
*stuck*: when everything in use belongs to holders that themselves wait for more.

A budget over a *space* grants a place in it too: then a request fits only if the space has room for it in
one piece.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

__all__ = ["Budget", "Space", "Ticket"]

P = TypeVar("P")


class Space(Protocol[P]):
    """Where amounts lie, each in one piece."""

    def allocate(self, amount: int) -> P | None:
        """Take a place, or None if none is large enough."""

    def free(self, place: P) -> None:
        """Give a place back."""


class Ticket(Generic[P]):
    """One request to a budget, whether it was granted, and the place that it got."""

    __slots__ = ("amount", "granted", "holder", "place", "since")

    def __init__(self, amount: int, holder: Hashable) -> None:
        self.amount = amount
        self.holder = holder
        self.granted = False
        self.place: P | None = None
        self.since = 0.0  # when it was granted, or joined the line; noted by whoever has a clock


class Budget(Generic[P]):
    """Count what is in use of a limit, and who is next in line.

    Args:
        limit: the most that can be in use at once, in whatever unit the caller counts.
        space: where the amounts lie; None if they lie nowhere.
    """

    def __init__(self, limit: int, space: Space[P] | None = None) -> None:
        self.limit = limit
        self.in_use = 0
        self.peak = 0
        self._space = space
        self._line: deque[Ticket[P]] = deque()
        self._held: dict[Hashable, int] = {}

    @property
    def waiting(self) -> int:
        """Count the requests that wait in line."""
        return len(self._line)

    def request(self, amount: int, holder: Hashable = None) -> Ticket[P]:
        """Ask for an amount; look at `granted` of the ticket for the answer.

        Args:
            amount: how much, at most the limit (who asks for more would wait for ever).
            holder: whom the amount belongs to until it is settled; None if it will come back whatever
                the holder waits for.

        Raises:
            ValueError: the amount is negative or could never be granted.
        """
        if not 0 <= amount <= self.limit:
            raise ValueError(f"amount must be between 0 and the limit of {self.limit}, got {amount}")
        ticket: Ticket[P] = Ticket(amount, holder)
        if self._line or not self._grant(ticket):
            self._line.append(ticket)
        return ticket

    def try_request(self, amount: int, holder: Hashable = None) -> Ticket[P] | None:
        """Take an amount if it is free now and nobody waits in line; never join the line.

        Raises:
            ValueError: the amount is negative.
        """
        if amount < 0:
            raise ValueError(f"amount must not be negative, got {amount}")
        if self._line:
            return None
        ticket: Ticket[P] = Ticket(amount, holder)
        return ticket if self._grant(ticket) else None

    def release(self, ticket: Ticket[P]) -> list[Ticket[P]]:
        """Take a request back, granted or not, and return the tickets that this granted, in order."""
        if not ticket.granted:
            self._line.remove(ticket)
        else:
            ticket.granted = False
            self.in_use -= ticket.amount
            if ticket.holder is not None:
                self._let_go(ticket)
            if self._space is not None and ticket.place is not None:
                self._space.free(ticket.place)
        return self._grant_in_order() if self._line else []

    def holds(self, ticket: Ticket[P]) -> bool:
        """Return whether what was granted belongs to a holder that is not settled."""
        return ticket.holder in self._held

    def reassign(self, ticket: Ticket[P], holder: Hashable) -> None:
        """Account what was granted to another holder; None as in `request`."""
        if ticket.holder is not None:
            self._let_go(ticket)
        ticket.holder = holder
        self._hold(ticket)

    def settle(self, holder: Hashable) -> None:
        """Note that what a holder has will come back, whatever that holder waits for."""
        self._held.pop(holder, None)

    def stuck(self, elsewhere: int = 0) -> Ticket[P] | None:
        """Return the request that must be refused so that the others can go on, or None.

        A budget is stuck when somebody waits and everything in use belongs to holders that wait too:
        none of them can go on, so none will release. The latest in line gives way, of those that hold
        something if there are any.

        Args:
            elsewhere: how much of what is in use will not be released either before somebody in the line
                goes on or gives up.
        """
        if not self._line or not (self._held or elsewhere):
            return None
        waiting = {ticket.holder for ticket in self._line if ticket.holder is not None}
        if sum(self._held.get(holder, 0) for holder in waiting) + elsewhere < self.in_use:
            return None
        latest = [ticket for ticket in reversed(self._line) if ticket.holder is not None]
        return next((ticket for ticket in latest if ticket.holder in self._held), next(iter(latest), None))

    def _grant(self, ticket: Ticket[P]) -> bool:
        if self.in_use + ticket.amount > self.limit:
            return False
        if self._space is not None and ticket.amount:
            ticket.place = self._space.allocate(ticket.amount)
            if ticket.place is None:
                return False
        ticket.granted = True
        self.in_use += ticket.amount
        self.peak = max(self.peak, self.in_use)
        if ticket.holder is not None:
            self._hold(ticket)
        return True

    def _hold(self, ticket: Ticket[P]) -> None:
        if ticket.holder is not None and ticket.amount:
            self._held[ticket.holder] = self._held.get(ticket.holder, 0) + ticket.amount

    def _let_go(self, ticket: Ticket[P]) -> None:
        left = self._held.get(ticket.holder, 0) - ticket.amount
        if left > 0:
            self._held[ticket.holder] = left
        else:
            self._held.pop(ticket.holder, None)

    def _grant_in_order(self) -> list[Ticket[P]]:
        granted: list[Ticket[P]] = []
        while self._line and self._grant(self._line[0]):
            granted.append(self._line.popleft())
        return granted
