"""Rounds in which a publisher publishes to several subscribers."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence

from verification.chaos import publishing, subscribing
from verification.chaos.audit import Account
from verification.chaos.broadcasts_audit import audit_broadcast
from verification.chaos.family import Family, GoneError, Member, RoundError
from verification.chaos.plan import RESOURCES, SLOTS, Fault, FaultKind, Round
from verification.chaos.rounds import Play, all_of, timed


class BroadcastFamily(Family):
    """A publisher and its subscribers; killed processes are replaced.

    In every round the processes open new publishers and subscribers, and close them.
    """

    sending = publishing
    taking = subscribing

    async def prepare(self, plan: Round) -> None:
        if not self.senders:
            self.senders = [await self.new_sender(plan, 0)]
        missing = range(len(self.takers), len(plan.takers))
        self.takers += await asyncio.gather(*(self.new_taker(plan, number) for number in missing))


class BroadcastPlay(Play):
    """One round of publications."""

    @property
    def publisher(self) -> Member:
        """The process of the current publisher."""
        return self.family.senders[0]

    @property
    def subscribers(self) -> list[Member]:
        """The processes that have a subscriber in this round."""
        return self.family.takers[: len(self.plan.takers)]

    async def begin(self) -> None:
        plans = zip(self.subscribers, self.plan.takers, strict=True)
        await asyncio.gather(
            self._open(self.publisher),
            *(subscriber.call(subscribing.open_receiver, plan) for subscriber, plan in plans),
        )
        await self.publisher.call(publishing.admit, len(self.subscribers))

    async def _open(self, member: Member) -> None:
        member.id = await member.call(publishing.open_sender, self.plan.senders[0])

    async def end(self, fault: Fault, target: int, member: Member) -> None:
        if target == 0 and fault.kind is FaultKind.CLOSE:
            member.id = await member.call(publishing.reopen, self.plan.senders[0])
        elif target == 0:
            await self._kill_publisher(member)
        elif fault.kind is FaultKind.CLOSE:
            await member.call(subscribing.close)
            await member.call(subscribing.open_receiver, self.plan.takers[target - SLOTS])
        else:
            await self._kill_subscriber(member, target)

    async def _kill_publisher(self, member: Member) -> None:
        family = self.family
        living = [one for one in self.subscribers if not one.is_killed]
        at = member.kill()
        self.gone.append((member, 0))
        async with all_of(self.told(one, at, one.call(subscribing.heard, member.id)) for one in living):
            pass
        await member.ended()  # the kernel may close its sockets later than it closes its connections
        replacement = await family.new_sender(self.plan, 0)
        await self._open(replacement)
        self.new.append(replacement)
        family.senders[0] = replacement
        self.send(replacement, 0, 1)

    async def _kill_subscriber(self, member: Member, target: int) -> None:
        family, publisher = self.family, self.publisher
        at = member.kill()
        self.gone.append((member, target))
        await self.told(publisher, at, publisher.call(publishing.lost, member.pid))
        if self._releases_at_once:
            with contextlib.suppress(GoneError):
                lost_bytes, took = await timed(publisher, at, publisher.call(publishing.told))
                self.note_time("a subscriber's memory is released", took)
                if self.is_late(took) or lost_bytes:
                    how = f"after {took:.3f} s, and {lost_bytes} bytes were lost"
                    raise RoundError(f"the memory of {member.name} was released {how}")
        await member.ended()
        number = target - SLOTS
        replacement = await family.new_taker(self.plan, number)
        await replacement.call(subscribing.open_receiver, self.plan.takers[number])
        self.new.append(replacement)
        family.takers[number] = replacement

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

    def audit(self, accounts: Sequence[Account], tally: Counter[str]) -> list[str]:
        return audit_broadcast(self.plan, accounts, tally)

    def may_log(self, line: str, slot: int) -> bool:
        return "protocol" not in line and bool(self.plan.of(RESOURCES))

    def segments(self, slot: int) -> tuple[int, int]:
        return 0, 0
