"""Rounds in which a publisher publishes to several subscribers."""

import asyncio
import contextlib
import time

from verification.chaos import publishing, subscribing
from verification.chaos.audit import RESOURCES, Account, Tally
from verification.chaos.broadcasts_audit import audit_broadcast
from verification.chaos.family import Family, GoneError, Member, RoundError, SendersPart
from verification.chaos.plan import ELDERS, SLOTS, Fault, FaultKind, Round
from verification.chaos.rounds import Play, all_of, timed

__all__ = ["BroadcastFamily", "BroadcastPlay"]


class BroadcastFamily(Family):
    """A publisher and its subscribers; killed processes are replaced.

    In every round the processes open new publishers and subscribers, and close them.
    """

    sending: SendersPart = publishing

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.subscribers: list[Member] = []

    @property
    def elder(self) -> Member | None:
        match ELDERS.get(self.name):
            case None:
                return None
            case 0:
                return self.senders[0]
            case slot:
                return self.subscribers[slot - SLOTS]

    @property
    def members(self) -> list[Member]:
        return [*self.senders, *self.subscribers]

    @property
    def by_slot(self) -> list[tuple[int | None, Member]]:
        return [*enumerate(self.senders), *enumerate(self.subscribers, SLOTS)]

    async def new_sender(self, plan: Round, slot: int) -> Member:
        """Start a process for a publisher, without opening the publisher."""
        return await self._new("publisher", self.listening, uvloop=plan.senders[slot].uvloop)

    async def new_subscriber(self, plan: Round, number: int) -> Member:
        """Start a process for a subscriber, without opening the subscriber."""
        return await self._new(f"subscriber-{number}", self.connecting, uvloop=plan.takers[number].uvloop)

    async def prepare(self, plan: Round) -> None:
        await super().prepare(plan)
        missing = range(len(self.subscribers), len(plan.takers))
        self.subscribers += await asyncio.gather(*(self.new_subscriber(plan, number) for number in missing))

    async def finish(self) -> list[str]:
        wrong = await super().finish()
        self.subscribers = []
        return wrong

    async def _begin(self, plan: Round) -> None:
        self.senders = [await self.new_sender(plan, 0)]
        self.has_ended = False


class BroadcastPlay(Play):
    """One round of publications."""

    family: BroadcastFamily

    @property
    def publisher(self) -> Member:
        """The process of the current publisher."""
        return self.family.senders[0]

    @property
    def subscribers(self) -> list[Member]:
        """The processes that have a subscriber in this round."""
        return self.family.subscribers[: len(self.plan.takers)]

    async def begin(self) -> None:
        plans = zip(self.subscribers, self.plan.takers, strict=True)
        await asyncio.gather(
            self._open(self.publisher),
            *(subscriber.call(subscribing.open_receiver, plan) for subscriber, plan in plans),
        )
        await self.publisher.call(publishing.admit, len(self.subscribers))

    async def _open(self, member: Member) -> None:
        options = self.plan.publisher
        if options is None:
            raise AssertionError("the plan of a broadcast has the options of its publisher")
        await member.call(publishing.know, options)
        member.id = await member.call(publishing.open_sender, self.plan.senders[0])

    def member(self, target: int | None) -> Member:
        if target is None:
            raise AssertionError("a broadcast has no single receiver")
        return self.family.subscribers[target - SLOTS] if target else self.publisher

    async def end(self, fault: Fault, member: Member) -> None:
        target = fault.target or 0
        if target == 0:
            await (self._close_publisher if fault.kind is FaultKind.CLOSE else self._kill_publisher)(member)
        elif fault.kind is FaultKind.CLOSE:
            await member.call(subscribing.close)
            await member.call(subscribing.open_receiver, self.plan.takers[target - SLOTS])
        else:
            await self._kill_subscriber(member, target)

    async def _close_publisher(self, member: Member) -> None:
        member.id = await member.call(publishing.reopen, self.plan.senders[0])

    async def _kill_publisher(self, member: Member) -> None:
        family = self.family
        living = [one for one in self.subscribers if not one.is_killed]
        at = member.kill()
        self.gone.append((member, 0))
        async with all_of(self._heard(one, member.id, at) for one in living):
            pass
        await member.ended()  # the kernel may close its sockets later than it closes its connections
        replacement = await family.new_sender(self.plan, 0)
        await self._open(replacement)
        self.new.append(replacement)
        family.senders[0] = replacement
        self._send(replacement, 0, 1)

    async def _heard(self, subscriber: Member, publisher: str, at: float) -> None:
        with contextlib.suppress(GoneError):
            _, took = await timed(subscriber, at, subscriber.call(subscribing.heard, publisher))
            self.times.subscribers_told = max(self.times.subscribers_told, took)
            if self.is_late(took):
                raise RoundError(f"{subscriber.name} noticed the end of the publisher after {took:.3f} s")

    async def _kill_subscriber(self, member: Member, target: int) -> None:
        family, publisher = self.family, self.publisher
        at = member.kill()
        self.gone.append((member, target))
        with contextlib.suppress(GoneError):
            _, took = await timed(publisher, at, publisher.call(publishing.lost, member.pid))
            self.times.publisher_told = max(self.times.publisher_told, took)
            if self.is_late(took):
                raise RoundError(f"the publisher noticed the end of {member.name} after {took:.3f} s")
            if self._releases_at_once:
                retired, took = await timed(publisher, at, publisher.call(publishing.told))
                self.times.released = max(self.times.released, took)
                if self.is_late(took) or retired:
                    how = f"after {took:.3f} s, and {retired} segments were retired"
                    raise RoundError(f"the memory of {member.name} was released {how}")
        await member.ended()
        replacement = await family.new_subscriber(self.plan, target - SLOTS)
        await replacement.call(subscribing.open_receiver, self.plan.takers[target - SLOTS])
        self.new.append(replacement)
        family.subscribers[target - SLOTS] = replacement

    @property
    def _releases_at_once(self) -> bool:
        """Whether the memory of each subscriber whose connection ends in this round is free at once."""
        plan = self.plan
        if plan.kind.lands:
            return True  # each subscriber has its own memory
        # A closed subscriber may still read the memory; a killed one cannot.
        lives_on = (FaultKind.CLOSE, *RESOURCES)
        disconnects = plan.publisher is not None and plan.publisher.slow == "disconnect"
        return not disconnects and not any(fault.kind in lives_on for fault in plan.faults)

    async def recover(self, living: list[tuple[int, Member]]) -> None:
        """Check that another publication reaches every subscriber."""
        healed = time.monotonic()
        last = await self.publisher.call(publishing.finish, len(self.subscribers))
        await asyncio.gather(*(one.call(subscribing.finish, *last) for one in self.subscribers))
        self.times.recovered = max(self.times.recovered, time.monotonic() - healed)

    async def settle(self, living: list[Member]) -> list[str]:
        publisher, subscribers = self.publisher, [one for one in self.subscribers if not one.is_killed]
        await asyncio.gather(*(one.call(subscribing.settle) for one in subscribers))
        await publisher.call(publishing.settle, is_free=self._releases_at_once)
        problems = await publisher.call(publishing.close)
        await asyncio.gather(*(one.call(subscribing.ended) for one in subscribers))
        await asyncio.gather(*(one.call(subscribing.stop) for one in subscribers))
        return [f"{publisher.name}: {problem}" for problem in problems]

    def audit(self, accounts: list[Account], tally: Tally) -> list[str]:
        return audit_broadcast(self.plan, accounts, tally)

    def may_log(self, line: str, slot: int | None) -> bool:
        return "protocol" not in line and any(fault.kind in RESOURCES for fault in self.plan.faults)

    def segments(self, slot: int | None) -> int:
        return 0
