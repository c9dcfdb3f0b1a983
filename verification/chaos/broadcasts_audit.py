"""The audit of a broadcast: each subscriber received each publication once and in order, or missed it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from verification.chaos.audit import RESOURCES, Account, Tally
from verification.chaos.here import ARENA_BYTES
from verification.chaos.journal import (
    Admitted,
    Began,
    Broken,
    Counted,
    Disconnected,
    Ended,
    Event,
    Published,
    Received,
    Subscribed,
)
from verification.chaos.plan import LAST, SLOTS, FaultKind, Order, Round
from verification.chaos.silences import may_end_by_silence

__all__ = ["audit_broadcast"]

_ROUNDING = 64 << 10  # of each tensor and of the message to whole pages, at most
_ELEMENT_BYTES = 8


class _Course:
    """The publications of one publisher at one subscriber.

    Attributes:
        next: the number that follows the latest one.
        is_interrupted: whether a connection has ended since then.
        is_whole: whether all publications were received or missed over one connection.
    """

    def __init__(self, publisher: str) -> None:
        self.publisher = publisher
        self.next = 0
        self.received = 0
        self.missed = 0
        self.is_interrupted = False
        self.is_whole = True


class _Subscription:
    """One subscriber, from its opening to its end."""

    def __init__(self, opened: Subscribed, slot: int | None) -> None:
        self.opened = opened
        self.slot = slot
        self.courses: dict[str, _Course] = {}
        self.current: _Course | None = None
        self.is_disconnected = False  # before its first publication of the next publisher


class _Broadcast:
    def __init__(self, plan: Round, accounts: Sequence[Account]) -> None:
        self.plan = plan
        self.accounts = accounts
        self.problems: list[str] = []
        self.orders = {order.key: order for sender in plan.senders for part in sender.parts for order in part}
        self.published: dict[str, list[Published]] = defaultdict(list)  # by publisher
        self.admitted: dict[str, tuple[str, ...]] = {}
        self.counted: dict[str, dict[str, Counted]] = defaultdict(dict)  # by publisher and subscriber
        self.numbers: dict[int, tuple[str, int]] = {}  # of each key
        self.keys: dict[tuple[str, int], int] = {}
        self.killed: set[str] = set()  # publishers

    def run(self, tally: Tally) -> list[str]:
        for account in self.accounts:
            for event in account.events:
                self._note(account, event)
        known = {(event.publisher, event.number) for events in self.published.values() for event in events}
        for publisher, number in self.keys.keys() - known:
            if publisher in self.published and publisher not in self.killed:
                self.problems.append(f"publication {number} of {publisher} was received, and never published")
        for account in self.accounts:
            if account.slot is not None and account.slot >= SLOTS:
                self._check_subscriber(account, tally)
            else:
                self._check_publisher(account, tally)
        return self.problems

    def _note(self, account: Account, event: Event) -> None:
        match event:
            case Published():
                self._is(event.key, event.publisher, event.number)
                self.published[event.publisher].append(event)
                if account.is_killed:
                    self.killed.add(event.publisher)
            case Received():
                self._is(event.key, event.publisher, event.number)
            case Admitted():
                self.admitted[event.publisher] = event.subscribers
            case Counted():
                self.counted[event.publisher][event.subscriber] = event
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

    def _check_publisher(self, account: Account, tally: Tally) -> None:
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

    def _outcome(self, account: Account, order: Order, end: Ended | None, tally: Tally) -> str:
        was_published = order.key in self.numbers
        if end is None:
            tally.publications["unknown"] += 1
            return "" if account.is_killed else "its call never ended"
        if end.how == "whole":
            tally.publications["published"] += 1
            return "" if was_published else "it has no number"
        tally.publications[f"ended with {end.how}"] += 1
        if was_published and order.how != "drain":
            return f"its call ended with {end.how} ({end.text}), and it was published"
        if not self._may_raise(account, order, end.how):
            return f"nothing that happened in this round explains its {end.how}: {end.text}"
        return ""

    def _may_raise(self, account: Account, order: Order, how: str) -> bool:
        options = self.plan.publisher
        match how:
            case "cancelled":
                return order.fate == "cancel"
            case "WouldBlockError":
                # A publication never waits for memory that only tensors from `allocate` hold.
                allocates = any(one.how == "allocate" for one in self.orders.values())
                has_limit = options is not None and options.max_wait_s is not None
                return order.how == "nowait" or has_limit or allocates
            case "TooLargeError":
                nbytes = sum(order.counts) * _ELEMENT_BYTES + (len(order.counts) + 1) * _ROUNDING
                return nbytes > self._limit()
            case "ClosedError":
                return self.plan.has(account.slot, (FaultKind.CLOSE,))
            case "OSError":
                return self.plan.has(account.slot, RESOURCES)
        return False

    def _limit(self) -> int:
        options = self.plan.publisher
        limit = None if options is None else options.max_held_bytes
        return ARENA_BYTES if limit is None else limit

    # Subscribers

    def _check_subscriber(self, account: Account, tally: Tally) -> None:
        one: _Subscription | None = None
        for event in account.events:
            match event:
                case Subscribed():
                    one = _Subscription(event, account.slot)
                case Received() if one is not None:
                    tally.publications["received"] += 1
                    tally.publications["missed"] += event.missed
                    problem = self._receive(one, event)
                    if problem:
                        self.problems.append(f"{account.name} received {event}: {problem}")
                case Disconnected() if one is not None:
                    tally.publications[f"ends of connections: {event.error or 'closed'}"] += 1
                    if not self._may_end(event.error):
                        self.problems.append(f"{account.name}: nothing explains {event}")
                    if one.current is not None:
                        one.current.is_interrupted = True
                    one.is_disconnected = True
        if one is not None and not account.is_killed:
            self.problems += [f"{account.name}: {problem}" for problem in self._wrong_at_end(one)]

    def _receive(self, one: _Subscription, event: Received) -> str:
        course, first = one.courses.get(event.publisher), event.number - event.missed
        if course is None:
            if one.current is not None and not one.is_disconnected:
                return f"no connection to {one.current.publisher} has ended"
            course = one.courses[event.publisher] = _Course(event.publisher)
            # Unless it may reconnect, the end since the last publication is that of the publisher before.
            course.is_whole = not one.is_disconnected or (bool(one.current) and not self._may_reconnect(one))
            problem = self._begin(one, event.publisher, first)
        elif course is not one.current:
            return f"it returned from {one.current}"
        else:
            problem = "" if first == course.next else f"the next number was {course.next}"
        is_explained = self._slow == "drop" or one.is_disconnected
        if event.missed < 0:
            problem = problem or "it cannot have missed so many"
        if event.missed > 0 and not is_explained:
            problem = problem or "nothing explains that it missed any"
        if course.is_interrupted:
            course.is_interrupted = course.is_whole = False
            if not self._may_reconnect(one):
                problem = problem or f"nothing explains that the connection to {event.publisher} ended"
        course.next = event.number + 1
        course.received += 1
        course.missed += event.missed
        one.current, one.is_disconnected = course, False
        return problem

    def _begin(self, one: _Subscription, publisher: str, first: int) -> str:
        """Return the problem with the first publication of a subscriber, or ""."""
        options = self.plan.publisher
        if one.opened.subscriber in self.admitted.get(publisher, ()):
            return "" if first == 0 else "it was connected before the first publication"
        earlier = [
            event.number + 1 for event in self.published.get(publisher, ()) if event.at < one.opened.at
        ]
        history = 0 if options is None else options.history
        if first < max(earlier, default=0) - history:
            return f"it connected after {max(earlier)}, and the history has {history} publications"
        return ""

    def _wrong_at_end(self, one: _Subscription) -> list[str]:
        """Check that a subscriber that lives on has received everything until its publishers closed."""
        problems = []
        for publisher, published in self.published.items():
            course, end = one.courses.get(publisher), published[-1].number + 1
            counted = self.counted[publisher].get(one.opened.subscriber)
            if counted is None and (self._may_reconnect(one) or publisher in self.killed):
                continue
            if (
                course is None
                and counted is None
                and one.opened.subscriber not in self.admitted.get(publisher, ())
            ):
                continue  # it connected to another one
            if course is None or course.next != end:
                problems.append(f"it has not received publication {end - 1} of {publisher}")
            elif counted is not None and course.is_whole:
                found, expected = (course.received, course.missed), (counted.delivered, counted.dropped)
                if found != expected:
                    problems.append(f"it received and missed {found}, and {publisher} counted {expected}")
        return problems

    @property
    def _slow(self) -> str:
        return "" if self.plan.publisher is None else self.plan.publisher.slow

    @property
    def _has_shortages(self) -> bool:
        return any(fault.kind in RESOURCES for fault in self.plan.faults)

    def _may_reconnect(self, one: _Subscription) -> bool:
        """Return whether the connection of a subscriber to a publisher that lives on may end."""
        is_silent = may_end_by_silence(self.plan, self.accounts, (0, one.slot))
        return self._slow == "disconnect" or self._has_shortages or is_silent

    def _may_end(self, error: str) -> bool:
        """Return whether a connection may end with an error, if its publisher may have ended."""
        return error in ("", "PeerLostError") or (
            error in ("RefusedError", "OSError") and self._has_shortages
        )


def audit_broadcast(plan: Round, accounts: Iterable[Account], tally: Tally) -> list[str]:
    """Account for every publication of a round, at every subscriber.

    Args:
        plan: the plan of the round.
        accounts: the accounts of all processes that took part in it.
        tally: counts how the publications ended.

    Returns:
        the problems.
    """
    return _Broadcast(plan, list(accounts)).run(tally)
