"""A budget of permits or bytes, granted first come first served. It decides; it never waits.

    request --fits and nobody waits--> granted --release--> (gone)
       |                                  ^
       '--else--> waiting ----------------'  as soon as it is first in line and fits
                     |
                     '--withdraw--> (gone)

Whoever is first in line blocks everybody behind: a big request is never starved by small ones. What is
granted belongs to its *holder* until it is released or settled, so that a budget can see when it is
*stuck*: when everything in use belongs to holders that themselves wait for more.
"""

from collections import deque
from collections.abc import Hashable

__all__ = ["Budget", "Ticket"]


class Ticket:
    """One request to a budget, and whether it was granted."""

    __slots__ = ("amount", "granted", "holder")

    def __init__(self, amount: int, holder: Hashable) -> None:
        self.amount = amount
        self.holder = holder
        self.granted = False


class Budget:
    """Count what is in use of a limit, and who is next in line.

    Args:
        limit: the most that can be in use at once, in whatever unit the caller counts.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self.peak = 0
        self._line: deque[Ticket] = deque()
        self._held: dict[Hashable, int] = {}

    @property
    def waiting(self) -> int:
        """Count the requests that wait in line."""
        return len(self._line)

    def request(self, amount: int, holder: Hashable = None) -> Ticket:
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
        ticket = Ticket(amount, holder)
        self._line.append(ticket)
        self._grant_in_order()
        return ticket

    def try_request(self, amount: int, holder: Hashable = None) -> bool:
        """Take an amount if it is free now and nobody waits in line; never join the line."""
        if self._line or self.in_use + amount > self.limit:
            return False
        return self.request(amount, holder).granted

    def release(self, amount: int, holder: Hashable = None) -> list[Ticket]:
        """Give an amount back, and return the tickets that this granted, in order."""
        self._let_go(amount, holder)
        self.in_use -= amount
        return self._grant_in_order()

    def withdraw(self, ticket: Ticket) -> list[Ticket]:
        """Take a request back, granted or not, and return the tickets that this granted, in order."""
        if ticket.granted:
            return self.release(ticket.amount, ticket.holder)
        self._line.remove(ticket)
        return self._grant_in_order()

    def settle(self, holder: Hashable) -> None:
        """Note that what a holder has will come back, whatever that holder waits for."""
        self._held.pop(holder, None)

    def stuck(self, elsewhere: int = 0) -> Ticket | None:
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

    def _let_go(self, amount: int, holder: Hashable) -> None:
        if holder is None:
            return
        left = self._held.get(holder, 0) - amount
        if left > 0:
            self._held[holder] = left
        else:
            self._held.pop(holder, None)

    def _grant_in_order(self) -> list[Ticket]:
        granted: list[Ticket] = []
        while self._line and self.in_use + self._line[0].amount <= self.limit:
            ticket = self._line.popleft()
            ticket.granted = True
            self.in_use += ticket.amount
            self.peak = max(self.peak, self.in_use)
            if ticket.holder is not None and ticket.amount:
                self._held[ticket.holder] = self._held.get(ticket.holder, 0) + ticket.amount
            granted.append(ticket)
        return granted
