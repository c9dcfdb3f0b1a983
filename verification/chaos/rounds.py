"""Run a round: start it, inject its faults, wait until it ends, and check the result."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiotensor import TensorHandle
from verification.chaos import faults, here, sending, taking
from verification.chaos.audit import Audit, TensorsAudit
from verification.chaos.family import WATCHDOG_S, Family, GoneError, Member, RoundError
from verification.chaos.journal import Sent
from verification.chaos.plan import ENDS, RESOURCES, SLOTS, Fault, FaultKind, Round
from verification.processes import watch
from verification.processes.peers import fork_and_sleep
from verification.promptly import allowed_s

T = TypeVar("T")

_TOLD_WITHIN_S = 1.0
_REFUSALS = 2  # logged in less than a second: an immediate one, and an early one when a server ends
_REAPED_S = 0.02  # within which a thread of ZeroMQ closes the descriptors of a closed socket


class Play:
    """One round of one family.

    Args:
        plan: the plan of the round.
        family: the processes.
        times: the longest times of the run in seconds, by what they were spent on; updated.

    Attributes:
        auditor: the class of its audit.
        gone: the killed processes.
    """

    auditor: type[Audit] = TensorsAudit

    def __init__(self, plan: Round, family: Family, times: dict[str, float]) -> None:
        self.plan = plan
        self.family = family
        self.gone: list[Member] = []
        self._times = times
        self._programs: set[asyncio.Task[None]] = set()
        self._receiver_is_old = True
        self._lingering: list[int] = []
        self._began = time.monotonic()

    async def run(self, tally: Counter[str]) -> list[str]:
        """Run the round, count the outcomes of its messages, and return the problems."""
        family, plan = self.family, self.plan
        await asyncio.gather(*(member.call(here.begin_round) for member in family.members))
        for member in family.members:
            member.is_new = False
        await self.begin()
        for slot, sender in enumerate(family.senders):
            self.send(sender, slot, 0)
        try:
            async with asyncio.timeout(3 * WATCHDOG_S), all_of(self.inject(fault) for fault in plan.faults):
                pass
            while self._programs:
                await asyncio.gather(*self._programs)
                self._programs = {program for program in self._programs if not program.done()}
        finally:
            for program in self._programs:
                program.cancel()
            for pid in self._lingering:
                os.kill(pid, signal.SIGKILL)
        recovering = time.monotonic()
        await self.recover()
        settling = time.monotonic()
        self.note_time("a message of every sender has arrived", settling - recovering)
        problems = await self.settle()
        self.note_time("every permit and block is released", time.monotonic() - settling)
        if plan.is_remote:
            await asyncio.gather(*(member.measure_pause() for member in family.members))
        members = [*dict.fromkeys([*self.gone, *family.members])]
        problems += self.auditor(plan, members, tally).run()
        problems += await self._look_around(members)
        if problems:
            problems += [f"log of {member.name}: {line}" for member in members for line in member.logged]
        for member in self.gone:
            await member.close()
        return problems

    def note_time(self, what: str, took: float) -> None:
        """Note how long something took."""
        self._times[what] = max(self._times.get(what, 0.0), took)

    @staticmethod
    def is_late(took: float) -> bool:
        """Return whether more time than promised has passed since a loss."""
        return took > _TOLD_WITHIN_S and took > allowed_s(_TOLD_WITHIN_S)

    # The round

    async def begin(self) -> None:
        """Start the receiver according to the plan."""
        family = self.family
        for sender in family.senders:
            sender.losses = await sender.call(sending.losses)
        await family.receiver.call(taking.take, self.plan.takers[0], [sender.id for sender in family.senders])

    async def end(self, fault: Fault, member: Member) -> None:
        """Close the object of a process and open another, or kill the process and replace it."""
        family, target, number = self.family, fault.target, fault.target - SLOTS
        closes = fault.kind is FaultKind.CLOSE
        if closes and target < SLOTS:
            member.id = await member.call(family.sending.reopen, self.plan.senders[target])
            return
        await self.leave(fault, member)
        if not closes:
            await member.ended()  # its socket may listen for a moment longer than its connections last
        if target < SLOTS:
            await self.replace_sender(target)
        else:
            await self.take_over(member if closes else await family.new_taker(self.plan, number), number)

    async def leave(self, fault: Fault, member: Member) -> None:
        """Kill a process or close its receiver, and check that its peers notice that in time."""
        family, receiver = self.family, self.family.receiver
        if fault.target >= SLOTS:
            self._receiver_is_old = False
            at = await self.depart(fault, member)
            senders = [sender for sender in family.senders if not sender.is_new]
            await self.all_told(at, {one: one.call(sending.told, one.losses) for one in senders})
            return
        watched = self._receiver_is_old and not self.plan.has(fault.target, (FaultKind.CLOSE,))
        at = await self.depart(fault, member)
        if not watched:
            return
        with contextlib.suppress(GoneError):
            pid, took = await timed(receiver, at, receiver.call(taking.heard, member.id))
            if self._receiver_is_old:
                self.note_time("the loss of a peer is noticed", took)
                if self.is_late(took) or pid != member.pid:
                    raise RoundError(f"the end of {member.name} was told after {took:.3f} s, naming {pid}")

    async def depart(self, fault: Fault, member: Member) -> float:
        """Kill a process, or close its receiver, server or subscriber; return the time."""
        if fault.kind is FaultKind.CLOSE:
            await member.call(self.family.taking.close)
            return time.monotonic()
        self.gone.append(member)
        return member.kill()

    def send(self, sender: Member, slot: int, part: int) -> None:
        """Start carrying out the orders of a part."""
        program = asyncio.create_task(self._program(sender, slot, part))
        self._programs.add(program)

    async def _program(self, sender: Member, slot: int, part: int) -> None:
        orders = self.plan.senders[slot], part
        with contextlib.suppress(GoneError):
            await sender.call(here.carry_out_all, self.family.sending.carry_out, *orders)

    async def inject(self, fault: Fault) -> None:
        """Inject a fault when it is due."""
        await asyncio.sleep(fault.at_ms / 1000)
        member = self.family.at(fault.target)
        with contextlib.suppress(GoneError):
            if fault.kind is FaultKind.KILL_WITH_FORK:
                self._lingering.append(await member.call(fork_and_sleep))
            if fault.kind in ENDS:
                await self.end(fault, member)
            elif fault.kind is FaultKind.STOP:
                await member.stop(fault.for_ms / 1000)
            else:
                await member.call(faults.suffer, fault.kind, fault.for_ms / 1000, self.plan.number)

    async def replace_sender(self, slot: int) -> None:
        """Start a new process in place of a killed one."""
        family = self.family
        replacement = await family.new_sender(self.plan, slot)
        replacement.is_new = True
        family.senders[slot] = replacement
        self.send(replacement, slot, 1)

    async def take_over(self, taker: Member, number: int) -> None:
        """Open the receiver or server of a process in place of an earlier one."""
        family, plan = self.family, self.plan.takers[number]
        await taker.call(family.taking.open_receiver, plan)
        await self.resume(taker, number)
        if taker is not family.takers[number]:
            taker.is_new = True
            family.takers[number] = taker

    async def resume(self, taker: Member, number: int) -> None:
        """Let a new receiver or server take as planned."""
        await taker.call(self.family.taking.take, self.plan.takers[number])

    async def told(self, member: Member, at: float, telling: Awaitable[object]) -> None:
        """Wait until a process has noticed the end of another, and check that this is within the promise."""
        with contextlib.suppress(GoneError):
            _, took = await timed(member, at, telling)
            self.note_time("the loss of a peer is noticed", took)
            if self.is_late(took):
                raise RoundError(f"{member.name} noticed the end of a peer after {took:.3f} s")

    async def all_told(self, at: float, telling: Mapping[Member, Coroutine[Any, Any, object]]) -> None:
        """Wait until processes have noticed the end of another, which each call tells."""
        async with all_of(self.told(member, at, call) for member, call in telling.items()):
            pass

    # Its end

    async def recover(self) -> None:
        """Check that a tensor of every sender arrives, or that each client is answered."""
        family = self.family
        await asyncio.gather(*(taker.call(family.taking.stop) for taker in family.takers))
        # Concurrently: a probe may wait for a permit that `ask` releases, and `ask` may wait for a sender.
        await asyncio.gather(self.ask(), *(family.probe(slot) for slot in range(SLOTS)))

    async def ask(self) -> None:
        """Request every tensor that has a handle from the receiver."""
        family = self.family
        senders = {*family.senders}
        if self._receiver_is_old:  # a new one does not know the senders killed before it started
            senders |= {member for member in self.gone if member.slot < SLOTS}
        handles = [
            TensorHandle(*event.handle, "int64", (1,), "cpu")
            for sender in senders
            for event in sender.events()
            if isinstance(event, Sent)
        ]
        await family.receiver.call(taking.answer, handles)

    async def settle(self) -> list[str]:
        """Wait until nothing is held, and return the problems of all processes."""
        family = self.family
        settling = {member.name: member.call(family.taking.settle) for member in family.takers}
        settling |= {member.name: member.call(family.sending.settle) for member in family.senders}
        found = await asyncio.gather(*settling.values())
        return [f"{name}: {wrong}" for name, wrongs in zip(settling, found, strict=True) for wrong in wrongs]

    def may_log(self, line: str, slot: int) -> bool:
        """Return whether a fault in the plan explains an error in a log."""
        return "protocol" not in line and self.plan.has(slot, RESOURCES)

    async def _look_around(self, members: Sequence[Member]) -> list[str]:
        family = self.family
        problems = [f"left in the folder: {name}" for name in family.left_in_folder()]
        for member in members:
            problems += self._said(member)
            if not member.is_killed:
                problems += await _wrong_with_process(member, *self.segments(member.slot))
        mine = [f"torch_{member.pid}_" for member in family.members]
        for name in os.listdir("/dev/shm"):  # noqa: S108 - read only
            if "aiotensor" in name or any(name.startswith(one) for one in mine):
                problems.append(f"left in /dev/shm: {name}")
        return problems

    def segments(self, slot: int) -> tuple[int, int]:
        """Return how many segments a process may have mapped, and how many of them have two descriptors."""
        return (SLOTS if slot >= SLOTS else 1), 0

    def _said(self, member: Member) -> list[str]:
        problems = [f"{member.name} complained: {member.complaints}"] if member.complaints else []
        lines = member.new_log()
        refusals = sum("a connection to " in line and " was refused" in line for line in lines)
        allowed = _REFUSALS + time.monotonic() - self._began
        if refusals > allowed:
            problems.append(f"{member.name} logged {refusals} refused connections")
        for line in lines:
            is_error = " ERROR " in line or " CRITICAL " in line or "Traceback" in line
            if is_error and not self.may_log(line, member.slot):
                problems.append(f"{member.name} logged: {line}")
        return problems


@asynccontextmanager
async def all_of(works: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run these concurrently with the block, and wait for them; the first error cancels all."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
            yield
    except* RoundError as errors:
        raise errors.exceptions[0] from None


async def timed(member: Member, at: float, call: Awaitable[T]) -> tuple[T, float]:
    """Return the result and the time since an event, excluding the time for which the process was stopped."""
    result = await call
    return result, time.monotonic() - max(at, member.continued_at)


async def _wrong_with_process(member: Member, segments: int, forwarded: int) -> list[str]:
    """Compare the descriptors and mappings of a process with the expected ones."""
    ends = time.monotonic() + WATCHDOG_S
    is_first = member.own_descriptors is None
    last: list[str] | None = None
    while True:  # unmapping runs in a thread, and the end of a connection may be noticed late
        mapped, descriptors = watch.memfds(member.pid), watch.targets(member.pid)
        own = [name for name in descriptors if "memfd:aiotensor " not in name and name != "pipe"]
        if member.own_pipes is None:
            member.own_pipes = descriptors.count("pipe")
        tokens = descriptors.count("pipe") - member.own_pipes  # one for each segment and reader
        # A process may still be closing descriptors in its first round, so it may have fewer in the second.
        known = member.own_descriptors
        sets_baseline = known is None or (
            not member.has_confirmed_descriptors and own != known and Counter(own) <= Counter(known)
        )
        if sets_baseline and own == last:
            member.own_descriptors = own
        memory = sum("memfd:aiotensor " in name for name in descriptors)
        if (
            own == member.own_descriptors
            and memory - forwarded <= mapped <= segments
            and tokens <= 8 * segments
        ):
            member.has_confirmed_descriptors = not is_first
            return []
        if time.monotonic() > ends:
            before, now = Counter(member.own_descriptors or ()), Counter(descriptors)
            gone = "".join(f"\n  - {name}" for name in (before - now).elements())
            new = "".join(f"\n  + {name}" for name in (now - before).elements())
            return [f"{member.name} has {mapped} segments, and other descriptors than before:{gone}{new}"]
        last = own
        await asyncio.sleep(_REAPED_S if sets_baseline else 0.001)
