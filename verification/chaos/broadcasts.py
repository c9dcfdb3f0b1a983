"""Rounds in which a publisher publishes to several subscribers, and their audit."""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence

from verification.chaos import publishing, subscribing
from verification.chaos.audit import Audit
from verification.chaos.family import Family, GoneError, Member, RoundError
from verification.chaos.here import ARENA_BYTES
from verification.chaos.journal import Disconnected, Ended, Event, Published, Received, Subscribed
from verification.chaos.plan import LAST, RESOURCES, SLOTS, Fault, FaultKind, Order, Round
from verification.chaos.rounds import Play, all_of, timed

_ROUNDING = 64 << 10  # of each tensor and of the message to whole pages, at most
_ELEMENT_BYTES = 8


class _Subscription:
    """One subscriber, from its opening to its end."""

    def __init__(self) -> None:
        self.following: dict[str, int] = {}  # the number of the next publication, by publisher
        self.current = ""  # the publisher of the latest one
        self.is_disconnected = False  # since then


class BroadcastAudit(Audit):
    """The audit of a publisher and its subscribers: each received each publication once, or missed it."""

    what = "publication"

    def __init__(self, plan: Round, members: Sequence[Member], tally: Counter[str]) -> None:
        super().__init__(plan, members, tally)
        self.published: dict[str, set[int]] = defaultdict(set)  # the numbers, by publisher
        self.numbers: dict[int, tuple[str, int]] = {}  # of each key
        self.keys: dict[tuple[str, int], int] = {}
        self.killed: set[str] = set()  # publishers

    def note(self, member: Member, event: Event) -> None:
        match event:
            case Published():
                self._is(event.key, event.publisher, event.number)
                self.published[event.publisher].add(event.number)
                if member.is_killed:
                    self.killed.add(event.publisher)
            case Received():
                self._is(event.key, event.publisher, event.number)
            case Subscribed() | Disconnected():
                pass
            case _:
                super().note(member, event)

    def _is(self, key: int, publisher: str, number: int) -> None:
        """Check that all processes agree on the number of a publication."""
        where = publisher, number
        if self.keys.setdefault(where, key) != key:
            self.problems.append(f"publication {where} is both {self.keys[where]} and {key}")
        if key != LAST and self.numbers.setdefault(key, where) != where:
            self.problems.append(f"{key} was published as {self.numbers[key]} and as {where}")

    def check(self, member: Member, order: Order, end: Ended | None) -> str:
        tally = self.tally
        was_published = order.key in self.numbers
        if end is None:
            tally["publications unknown"] += 1
            return "" if member.is_killed else "its call never ended"
        if end.how == "whole":
            tally["publications published"] += 1
            return "" if was_published else "it has no number"
        tally[f"publications ended with {end.how}"] += 1
        if was_published and order.how != "drain":
            return f"its call ended with {end.how} ({end.text}), and it was published"
        is_explained = self.may_raise(member, order, end)
        return "" if is_explained else f"nothing explains its {end.how}: {end.text}"

    def may_raise(self, member: Member, order: Order, end: Ended) -> bool:
        options = self.plan.publisher
        match end.how:
            case "WouldBlockError":
                # A publication never waits for memory that only tensors from `allocate` hold.
                allocates = any(one.how == "allocate" for one in self.plan.orders.values())
                return order.how == "nowait" or options.max_wait_s is not None or allocates
            case "TooLargeError":
                nbytes = sum(order.counts) * _ELEMENT_BYTES + (len(order.counts) + 1) * _ROUNDING
                return nbytes > (options.max_held_bytes or ARENA_BYTES)
        return super().may_raise(member, order, end)

    def check_others(self) -> None:
        for publisher, number in self.keys:
            is_known = publisher in self.published and publisher not in self.killed
            if is_known and number not in self.published[publisher]:
                self.problems.append(f"publication {number} of {publisher} was received, and never published")
        for member in self.members:
            if member.slot >= SLOTS:
                self._check_subscriber(member)

    def _check_subscriber(self, member: Member) -> None:
        one, tally = _Subscription(), self.tally
        for event in member.events():
            match event:
                case Subscribed():
                    one = _Subscription()
                case Received():
                    tally["publications received"] += 1
                    tally["publications missed"] += event.missed
                    if problem := self._receive(member, one, event):
                        self.problems.append(f"{member.name} received {event}: {problem}")
                    one.following[event.publisher] = event.number + 1
                    one.current, one.is_disconnected = event.publisher, False
                case Disconnected():
                    tally[f"connections of subscribers ended with {event.error or 'closing'}"] += 1
                    if not self._may_end(event.error):
                        self.problems.append(f"{member.name}: nothing explains {event}")
                    one.is_disconnected = True

    def _receive(self, member: Member, one: _Subscription, event: Received) -> str:
        """Return the problem with a publication, or ""."""
        following = one.following.get(event.publisher)
        if one.current not in ("", event.publisher) and not (following is None and one.is_disconnected):
            return f"it followed those of {one.current}, whose connection has not ended"
        if following is not None and event.number - event.missed != following:
            return f"the next number was {following}"
        may_miss = self.plan.publisher.slow == "drop" or following is None or one.is_disconnected
        if event.missed < 0 or (event.missed and not may_miss):
            return "nothing explains that it missed so many"
        if following is not None and one.is_disconnected and not self._may_reconnect(member):
            return "nothing explains that the connection to its publisher ended"
        return ""

    def _may_reconnect(self, member: Member) -> bool:
        """Return whether the connection of a subscriber to a publisher that lives on may end."""
        is_silent = self.may_end_by_silence(0, member.slot)
        return self.plan.publisher.slow == "disconnect" or bool(self.plan.of(RESOURCES)) or is_silent

    def _may_end(self, error: str) -> bool:
        """Return whether a connection may end with an error, if its publisher may have ended."""
        may_be_refused = error in ("RefusedError", "OSError") and bool(self.plan.of(RESOURCES))
        return error in ("", "PeerLostError") or may_be_refused


class BroadcastFamily(Family):
    """A publisher and its subscribers; killed processes are replaced.

    In every round the processes open new publishers and subscribers, and close them.
    """

    sending = publishing
    taking = subscribing

    async def prepare(self, plan: Round) -> None:
        if not self.senders:
            self.senders = [await self.new_sender(plan, 0, opens=False)]
        missing = range(len(self.takers), len(plan.takers))
        self.takers += await asyncio.gather(*(self.new_taker(plan, number) for number in missing))


class BroadcastPlay(Play):
    """One round of publications."""

    auditor = BroadcastAudit

    @property
    def publisher(self) -> Member:
        """The process of the current publisher."""
        return self.family.senders[0]

    @property
    def subscribers(self) -> list[Member]:
        """The processes that have a subscriber in this round."""
        return self.family.takers[: len(self.plan.takers)]

    async def begin(self) -> None:
        publisher, plan = self.publisher, self.plan
        pairs = zip(self.subscribers, plan.takers, strict=True)
        async with all_of(one.call(subscribing.open_receiver, taker) for one, taker in pairs):
            publisher.id = await publisher.call(publishing.open_sender, plan.senders[0])
        await publisher.call(publishing.admit, len(self.subscribers))

    async def resume(self, taker: Member, number: int) -> None:
        """Do nothing: an open subscriber takes as planned."""

    async def leave(self, fault: Fault, member: Member) -> None:
        publisher = self.publisher
        at = await self.depart(fault, member)
        if fault.target == 0:
            await self.all_told(at, {one: one.call(subscribing.heard, member.id) for one in self.subscribers})
        elif fault.kind is not FaultKind.CLOSE:
            await self.all_told(at, {publisher: publisher.call(publishing.lost, member.pid)})
            if self._releases_at_once:
                with contextlib.suppress(GoneError):
                    lost_bytes, took = await timed(publisher, at, publisher.call(publishing.told))
                    self.note_time("a subscriber's memory is released", took)
                    if self.is_late(took) or lost_bytes:
                        how = f"after {took:.3f} s, and {lost_bytes} bytes were lost"
                        raise RoundError(f"the memory of {member.name} was released {how}")

    @property
    def _releases_at_once(self) -> bool:
        """Whether the memory of each subscriber whose connection ends in this round is free at once."""
        plan = self.plan
        if plan.is_remote:
            return True  # each subscriber has its own memory
        # A closed subscriber may still read the memory; a killed one cannot.
        lives_on = (FaultKind.CLOSE, *RESOURCES)
        return plan.publisher.slow != "disconnect" and not plan.of(lives_on)

    async def recover(self) -> None:
        """Check that another publication reaches every subscriber."""
        last = await self.publisher.call(publishing.finish, len(self.subscribers))
        await asyncio.gather(*(one.call(subscribing.finish, *last) for one in self.subscribers))

    async def settle(self) -> list[str]:
        publisher, subscribers = self.publisher, self.subscribers
        await asyncio.gather(*(one.call(subscribing.settle) for one in subscribers))
        await publisher.call(publishing.settle, is_free=self._releases_at_once)
        problems = await publisher.call(publishing.close)
        await asyncio.gather(*(one.call(subscribing.ended) for one in subscribers))
        await asyncio.gather(*(one.call(subscribing.stop) for one in subscribers))
        return [f"{publisher.name}: {problem}" for problem in problems]

    def may_log(self, line: str, slot: int) -> bool:
        return "protocol" not in line and bool(self.plan.of(RESOURCES))

    def segments(self, slot: int) -> tuple[int, int]:
        return 0, 0
