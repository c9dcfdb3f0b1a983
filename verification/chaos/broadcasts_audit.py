"""The audit of a broadcast: each subscriber received each publication once and in order, or missed it."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from verification.chaos.audit import Account, may_end_by_silence
from verification.chaos.here import ARENA_BYTES
from verification.chaos.journal import (
    Began,
    Broken,
    Disconnected,
    Ended,
    Event,
    Published,
    Received,
    Subscribed,
)
from verification.chaos.plan import LAST, RESOURCES, SLOTS, FaultKind, Order, Round

_ROUNDING = 64 << 10  # of each tensor and of the message to whole pages, at most
_ELEMENT_BYTES = 8


class _Subscription:
    """One subscriber, from its opening to its end."""

    def __init__(self) -> None:
        self.following: dict[str, int] = {}  # the number of the next publication, by publisher
        self.current = ""  # the publisher of the latest one
        self.is_disconnected = False  # since then


class _Broadcast:
    def __init__(self, plan: Round, accounts: Sequence[Account]) -> None:
        self.plan = plan
        self.accounts = accounts
        self.problems: list[str] = []
        self.orders = plan.orders
        self.published: dict[str, set[int]] = defaultdict(set)  # the numbers, by publisher
        self.numbers: dict[int, tuple[str, int]] = {}  # of each key
        self.keys: dict[tuple[str, int], int] = {}
        self.killed: set[str] = set()  # publishers

    def run(self, tally: Counter[str]) -> list[str]:
        for account in self.accounts:
            for event in account.events:
                self._note(account, event)
        for publisher, number in self.keys:
            is_known = publisher in self.published and publisher not in self.killed
            if is_known and number not in self.published[publisher]:
                self.problems.append(f"publication {number} of {publisher} was received, and never published")
        for account in self.accounts:
            if account.slot >= SLOTS:
                self._check_subscriber(account, tally)
            else:
                self._check_publisher(account, tally)
        return self.problems

    def _note(self, account: Account, event: Event) -> None:
        match event:
            case Published():
                self._is(event.key, event.publisher, event.number)
                self.published[event.publisher].add(event.number)
                if account.is_killed:
                    self.killed.add(event.publisher)
            case Received():
                self._is(event.key, event.publisher, event.number)
            case Broken():
                self.problems.append(f"{account.name}: {event.text}")
            case Began() | Ended() | Subscribed() | Disconnected():
                pass
            case _:
                self.problems.append(f"{account.name} wrote {event}")

    def _is(self, key: int, publisher: str, number: int) -> None:
        """Check that all processes agree on the number of a publication."""
        where = publisher, number
        if self.keys.setdefault(where, key) != key:
            self.problems.append(f"publication {where} is both {self.keys[where]} and {key}")
        if key != LAST and self.numbers.setdefault(key, where) != where:
            self.problems.append(f"{key} was published as {self.numbers[key]} and as {where}")

    # Publishers

    def _check_publisher(self, account: Account, tally: Counter[str]) -> None:
        ends: dict[int, Ended | None] = {}
        for event in account.events:
            match event:
                case Began():
                    ends[event.key] = None
                case Ended():
                    ends[event.key] = event
        for key, end in ends.items():
            problem = self._outcome(account, self.orders[key], end, tally)
            if problem:
                self.problems.append(f"publication {key} of {account.name}: {problem}")

    def _outcome(self, account: Account, order: Order, end: Ended | None, tally: Counter[str]) -> str:
        was_published = order.key in self.numbers
        if end is None:
            tally["publications unknown"] += 1
            return "" if account.is_killed else "its call never ended"
        if end.how == "whole":
            tally["publications published"] += 1
            return "" if was_published else "it has no number"
        tally[f"publications ended with {end.how}"] += 1
        if was_published and order.how != "drain":
            return f"its call ended with {end.how} ({end.text}), and it was published"
        if not self._may_raise(account, order, end.how):
            return f"nothing that happened in this round explains its {end.how}: {end.text}"
        return ""

    def _may_raise(self, account: Account, order: Order, how: str) -> bool:
        match how:
            case "cancelled":
                return order.is_cancelled
            case "WouldBlockError":
                # A publication never waits for memory that only tensors from `allocate` hold.
                allocates = any(one.how == "allocate" for one in self.orders.values())
                return order.how == "nowait" or self.plan.publisher.max_wait_s is not None or allocates
            case "TooLargeError":
                nbytes = sum(order.counts) * _ELEMENT_BYTES + (len(order.counts) + 1) * _ROUNDING
                return nbytes > self._limit()
            case "ClosedError":
                return self.plan.has(account.slot, (FaultKind.CLOSE,))
            case "OSError":
                return self.plan.has(account.slot, RESOURCES)
        return False

    def _limit(self) -> int:
        limit = self.plan.publisher.max_held_bytes
        return ARENA_BYTES if limit is None else limit

    # Subscribers

    def _check_subscriber(self, account: Account, tally: Counter[str]) -> None:
        one = _Subscription()
        for event in account.events:
            match event:
                case Subscribed():
                    one = _Subscription()
                case Received():
                    tally["publications received"] += 1
                    tally["publications missed"] += event.missed
                    if problem := self._receive(account, one, event):
                        self.problems.append(f"{account.name} received {event}: {problem}")
                    one.following[event.publisher] = event.number + 1
                    one.current, one.is_disconnected = event.publisher, False
                case Disconnected():
                    tally[f"connections of subscribers ended with {event.error or 'closing'}"] += 1
                    if not self._may_end(event.error):
                        self.problems.append(f"{account.name}: nothing explains {event}")
                    one.is_disconnected = True

    def _receive(self, account: Account, one: _Subscription, event: Received) -> str:
        """Return the problem with a publication, or ""."""
        following = one.following.get(event.publisher)
        if one.current not in ("", event.publisher) and not (following is None and one.is_disconnected):
            return f"it followed those of {one.current}, whose connection has not ended"
        if following is not None and event.number - event.missed != following:
            return f"the next number was {following}"
        may_miss = self.plan.publisher.slow == "drop" or following is None or one.is_disconnected
        if event.missed < 0 or (event.missed and not may_miss):
            return "nothing explains that it missed so many"
        if following is not None and one.is_disconnected and not self._may_reconnect(account):
            return "nothing explains that the connection to its publisher ended"
        return ""

    @property
    def _has_shortages(self) -> bool:
        return bool(self.plan.of(RESOURCES))

    def _may_reconnect(self, account: Account) -> bool:
        """Return whether the connection of a subscriber to a publisher that lives on may end."""
        is_silent = may_end_by_silence(self.plan, self.accounts, (0, account.slot))
        return self.plan.publisher.slow == "disconnect" or self._has_shortages or is_silent

    def _may_end(self, error: str) -> bool:
        """Return whether a connection may end with an error, if its publisher may have ended."""
        return error in ("", "PeerLostError") or (
            error in ("RefusedError", "OSError") and self._has_shortages
        )


def audit_broadcast(plan: Round, accounts: Sequence[Account], tally: Counter[str]) -> list[str]:
    """Account for every publication at every subscriber, count the outcomes, and return the problems."""
    return _Broadcast(plan, accounts).run(tally)
