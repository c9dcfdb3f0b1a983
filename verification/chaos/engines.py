"""Rounds in which clients ask several engines over a network that is cut, while others attack them."""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from verification.chaos import answering, asking, here, networked
from verification.chaos.audit import Account, Tally
from verification.chaos.engines_audit import audit_engines, wrong_with_refusals
from verification.chaos.exchanges import ExchangePlay
from verification.chaos.family import Family, Member, RoundError, SendersPart
from verification.chaos.pauses import Pauses
from verification.chaos.plan import ENGINES, SLOTS, Fault, FaultKind, Round
from verification.promptly import allowed_s

__all__ = ["EnginesFamily", "EnginesPlay"]

_REACHED_WITHIN_S = 5.0


class EnginesFamily(Family):
    """Clients, and the engines to which each of them is connected; killed processes are replaced."""

    sending: SendersPart = networked
    addresses = ENGINES
    # With this many busy processes, a living peer may be silent for longer than the default timeout.
    timeouts: Mapping[str, Any] = {"heartbeat_interval_s": 0.25, "heartbeat_timeout_s": 2.0}

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.engines: list[Member] = []
        self.pauses = Pauses()
        self.paused_s = 0.0  # in the round before this one, whose losses may be noticed only now

    @property
    def members(self) -> list[Member]:
        return [*self.engines, *self.senders]

    @property
    def by_slot(self) -> list[tuple[int | None, Member]]:
        return [*enumerate(self.senders), *enumerate(self.engines, SLOTS)]

    def left_in_folder(self) -> list[str]:
        return os.listdir(self._meeting)

    async def new_sender(self, plan: Round, slot: int) -> Member:
        """Start a process with a client."""
        sender = plan.senders[slot]
        member = await self._new(f"client-{slot}", self.connecting, uvloop=sender.uvloop)
        await self._tell(member, None)
        member.id = await member.call(networked.open_sender, sender)
        return member

    async def new_engine(self, plan: Round, number: int) -> Member:
        """Start a process with an engine."""
        taker = plan.takers[number]
        member = await self._new(f"engine-{number}", self.listening, uvloop=taker.uvloop)
        await self._tell(member, number)
        await member.call(networked.open_receiver, taker)
        return member

    async def _tell(self, member: Member, engine: int | None) -> None:
        assert self.network is not None
        await member.call(networked.know, self.network.addresses, engine)

    async def leave(self, member: Member) -> None:
        await member.call(answering.leave if member in self.engines else asking.leave)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self.pauses.close()

    async def _begin(self, plan: Round) -> None:
        self.engines = await asyncio.gather(*(self.new_engine(plan, number) for number in range(ENGINES)))
        self.senders = await asyncio.gather(*(self.new_sender(plan, slot) for slot in range(SLOTS)))
        await asyncio.gather(*(sender.call(networked.probe) for sender in self.senders))
        self.has_ended = False


class EnginesPlay(ExchangePlay):
    """One round of questions to several engines."""

    family: EnginesFamily
    paused_s = 0.0

    async def run(self, tally: Tally) -> list[str]:
        self.began = time.monotonic()
        return await super().run(tally)

    async def begin(self) -> None:
        engines = zip(self.family.engines, self.plan.takers, strict=True)
        await asyncio.gather(*(engine.call(answering.take, plan, {}) for engine, plan in engines))

    def member(self, target: int | None) -> Member:
        if target is None:
            raise AssertionError("nothing happens to the network as to a process")
        return self.family.senders[target] if target < SLOTS else self.family.engines[target - SLOTS]

    async def inject(self, fault: Fault) -> None:
        if fault.kind is not FaultKind.ATTACK or fault.target is None:
            await super().inject(fault)
            return
        await asyncio.sleep(fault.at_ms / 1000)
        assert self.family.network is not None
        async with self.family.network.attacked(fault.target - SLOTS, fault.how):
            await asyncio.sleep(fault.for_ms / 1000)

    async def end(self, fault: Fault, member: Member) -> None:
        target = fault.target
        if target is None or (target < SLOTS and fault.kind is FaultKind.CLOSE):
            await super().end(fault, member)
        elif fault.kind is FaultKind.CLOSE:
            await member.call(answering.close)
            await member.call(networked.open_receiver, self.plan.takers[target - SLOTS])
            await member.call(answering.take, self.plan.takers[target - SLOTS], {})
        else:
            member.kill()
            self.gone.append((member, target))
            await member.ended()
            if target < SLOTS:
                await self.replace_sender(target)
            else:
                await self._replace_engine(target - SLOTS)

    async def _replace_engine(self, number: int) -> None:
        engine = await self.family.new_engine(self.plan, number)
        self.new.append(engine)
        self.family.engines[number] = engine
        await engine.call(answering.take, self.plan.takers[number], {})

    async def recover(self, living: list[tuple[int, Member]]) -> None:
        await asyncio.gather(*(sender.call(networked.probe) for _, sender in living))
        took = time.monotonic() - self.faults_ended
        self.times.reached = max(self.times.reached, took)
        if took > _REACHED_WITHIN_S and took > allowed_s(_REACHED_WITHIN_S):
            raise RoundError(f"{took:.3f} s after the faults every client had reached every engine")
        await asyncio.gather(*(engine.call(answering.stop) for engine in self.family.engines))

    async def settle(self, living: list[Member]) -> list[str]:
        members = [*living, *self.family.engines]
        paused = await asyncio.gather(*(member.call(here.paused_s) for member in members))
        self.paused_s = max(*paused, self.family.pauses.longest_s())
        self.times.paused = max(self.times.paused, self.paused_s)
        settling = {sender.name: sender.call(asking.settle) for sender in living}
        settling |= {engine.name: engine.call(answering.settle) for engine in self.family.engines}
        found = await asyncio.gather(*settling.values())
        return [f"{name}: {wrong}" for name, wrongs in zip(settling, found, strict=True) for wrong in wrongs]

    def audit(self, accounts: list[Account], tally: Tally) -> list[str]:
        before, self.family.paused_s = self.family.paused_s, self.paused_s
        return audit_engines(self.plan, accounts, tally, max(before, self.paused_s))

    def wrong_with_log(self, lines: list[str]) -> list[str]:
        return wrong_with_refusals(lines, time.monotonic() - self.began)

    def segments(self, slot: int | None) -> int:
        return 0
