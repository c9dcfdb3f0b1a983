"""Rounds in which clients ask servers, and the audit: each question ended once, as the plan explains."""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from verification.chaos import answering, asking
from verification.chaos.audit import Audit
from verification.chaos.family import Family, Member
from verification.chaos.journal import AnswerSent, Ended, Event, Heard
from verification.chaos.plan import ENDS, RESOURCES, SLOTS, Fault, FaultKind, Order, Round
from verification.chaos.rounds import Play

_ANSWERED = ("answer", "echo")  # the wishes of questions that get an answer


class RequestsFamily(Family):
    """Clients, and the servers to which each of them is connected; killed processes are replaced."""

    sending = asking
    taking = answering
    listeners = 2

    async def probe(self, slot: int) -> None:
        await self.senders[slot].call(asking.probe)

    async def leave(self, member: Member) -> None:
        await member.call(answering.close if member.slot >= SLOTS else asking.leave)


class RequestsAudit(Audit):
    """The audit of clients and servers."""

    what = "question"

    def __init__(self, plan: Round, members: Sequence[Member], tally: Counter[str]) -> None:
        super().__init__(plan, members, tally)
        self.heard: dict[int, list[str]] = defaultdict(list)  # by whom
        self.answered = Counter[int]()

    def note(self, member: Member, event: Event) -> None:
        match event:
            case Heard():
                self.heard[event.key].append(member.name)
            case AnswerSent():
                self.answered[event.key] += 1
            case _:
                super().note(member, event)

    def check_others(self) -> None:
        strange = (self.heard.keys() | self.answered.keys()) - self.begun.keys()
        self.problems += [f"question {key} was heard, and never asked" for key in strange]

    def check(self, member: Member, order: Order, end: Ended | None) -> str:
        by, answered = self.heard[order.key], self.answered[order.key]
        if len(by) > 1:
            self.tally[f"questions heard more than once ({order.how})"] += 1
        # By one server, unless the question may be repeated. An answer may be lost with its server, too.
        may_repeat = order.how == "idempotent" and (order.wish == "drop" or self._may_lose(member))
        if max(len(by), answered) > 1 + may_repeat:
            return f"heard by {by}, answered {answered} times, ended as {end}"
        if answered and (order.how == "one-way" or order.wish not in _ANSWERED):
            return "a client accepted an answer that was not due"
        if end is None:
            self.tally["questions whose client was killed"] += 1
            return "" if member.is_killed else "it never ended"
        if end.how != "whole":
            self.tally[f"questions ended with {end.how}"] += 1
            is_explained = self.may_raise(member, order, end)
            return "" if is_explained else f"nothing explains its {end.how}: {end.text}"
        if order.how == "one-way":
            self.tally["questions one-way, heard" if by else "one-way, lost"] += 1
            is_lost = not by and not self._may_disappear(member)
            return "it was sent and never received, and no process was lost" if is_lost else ""
        self.tally["questions answered"] += 1
        if order.wish not in _ANSWERED:
            return f"it was answered, though its handler had to {order.wish}"
        return "" if by else "it was answered, and no server received it"

    def _may_lose(self, member: Member) -> bool:
        """Return whether a connection of a client may have ended, other than by being closed."""
        servers = range(SLOTS, SLOTS + len(self.plan.takers))
        return (
            self.plan.ends_a_taker
            or bool(self.plan.of(RESOURCES))
            or any(self.may_end_by_silence(member.slot, one) for one in servers)
        )

    def _may_disappear(self, member: Member) -> bool:
        """Return whether a message that was sent may be lost, with its client or with the server."""
        plan = self.plan
        has_gone = member.is_killed or plan.has(member.slot, (FaultKind.CLOSE,))
        # Between machines, a message that was sent is not sent again: its server may have taken it.
        is_unknown = plan.is_remote and self._may_lose(member)
        return has_gone or plan.ends_a_taker or bool(plan.of(RESOURCES)) or is_unknown

    def may_raise(self, member: Member, order: Order, end: Ended) -> bool:
        plan, text = self.plan, end.text
        several = len(order.counts) > 1
        match end.how:
            case "PeerLostError" if "discarded this message" in text:
                return False  # another server has to get what a closing server has not taken
            case "PeerLostError":
                was_dropped = order.wish == "drop" and order.how != "one-way"
                return (was_dropped and "dropped without an answer" in text) or self._may_lose(member)
            case "RefusedError":  # by a server that has the memory of a client that has gone, too
                return any(fault.target < SLOTS for fault in plan.of(ENDS))
            case "RemoteError":
                name = text.partition(":")[0]
                if order.how != "one-way" and order.wish not in _ANSWERED and name == "HandlerError":
                    return True
                if name == "WouldBlockError":  # answers that wait for each other's memory
                    return several if order.wish == "echo" else len(order.answer) > 1
                return name == "OSError" and bool(plan.of(RESOURCES))
            case "WouldBlockError" | "TooLargeError":  # questions that wait for each other's memory
                return several
        return super().may_raise(member, order, end)


class RequestsPlay(Play):
    """One round of questions and answers."""

    auditor = RequestsAudit

    async def leave(self, fault: Fault, member: Member) -> None:
        at, is_client = await self.depart(fault, member), fault.target < SLOTS
        if fault.kind is not FaultKind.CLOSE:
            others = self.family.takers if is_client else self.family.senders
            lost = (answering if is_client else asking).lost
            await self.all_told(at, {one: one.call(lost, member.pid) for one in others})

    async def begin(self) -> None:
        await asyncio.gather(*map(self.resume, self.family.takers, itertools.count()))

    async def ask(self) -> None:
        """Do nothing: questions have no handles."""

    def may_log(self, line: str, slot: int) -> bool:
        # A handler's error is logged with its traceback; the client also gets it, and the audit checks that.
        is_of_handler = "answering a request from process" in line or "Traceback" in line
        return is_of_handler or super().may_log(line, slot)

    def segments(self, slot: int) -> tuple[int, int]:
        if slot >= SLOTS:
            return 1 + SLOTS, 0
        # Its own, those of the servers, and on one machine its own again, in which a server returns an echo.
        servers = len(self.plan.takers)
        return 1 + 2 * servers, servers
