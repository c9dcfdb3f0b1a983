"""Rounds in which clients ask servers, and the audit: each question ended once, as the plan explains."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence

from verification.chaos import answering, asking
from verification.chaos.audit import Account, may_end_by_silence
from verification.chaos.family import Family, Member
from verification.chaos.journal import AnswerSent, Began, Broken, Ended, Heard
from verification.chaos.plan import ENDS, RESOURCES, SLOTS, Fault, FaultKind, Order, Round
from verification.chaos.rounds import Play, all_of

_ANSWERED = ("answer", "echo")  # the wishes of questions that get an answer


class ExchangeFamily(Family):
    """Clients, and the servers to which each of them is connected; killed processes are replaced."""

    sending = asking
    taking = answering
    listeners = 2

    async def probe(self, slot: int) -> None:
        await self.senders[slot].call(asking.probe)

    async def leave(self, member: Member) -> None:
        await member.call(answering.close if "-server-" in member.name else asking.leave)


class ExchangePlay(Play):
    """One round of questions and answers."""

    async def end(self, fault: Fault, target: int, member: Member) -> None:
        family, number = self.family, target - SLOTS
        is_client = target < SLOTS
        if fault.kind is not FaultKind.CLOSE:
            at = member.kill()
            self.gone.append((member, target))
            part, others = (answering, family.takers) if is_client else (asking, family.senders)
            async with all_of(
                self.told(one, at, one.call(part.lost, member.pid)) for one in others if not one.is_killed
            ):
                pass
            await member.ended()  # its socket may listen for a moment longer than its connections last
        if is_client and fault.kind is FaultKind.CLOSE:
            await member.call(asking.reopen, self.plan.senders[target])
        elif is_client:
            await self.replace_sender(target)
        elif fault.kind is FaultKind.CLOSE:
            await member.call(answering.close)
            await self.take_over(member, number)
        else:
            await self.take_over(await family.new_taker(self.plan, number), number)

    async def begin(self) -> None:
        await asyncio.gather(
            *(self.resume(server, number) for number, server in enumerate(self.family.takers))
        )

    async def resume(self, taker: Member, number: int) -> None:
        await taker.call(answering.take, self.plan.takers[number])

    async def recover(self) -> None:
        family = self.family
        await asyncio.gather(*(server.call(answering.stop) for server in family.takers))
        await asyncio.gather(*(family.probe(slot) for slot in range(SLOTS)))

    async def settle(self) -> list[str]:
        settling = {client.name: client.call(asking.settle) for client in self.family.senders}
        settling |= {server.name: server.call(answering.settle) for server in self.family.takers}
        found = await asyncio.gather(*settling.values())
        return [f"{name}: {wrong}" for name, wrongs in zip(settling, found, strict=True) for wrong in wrongs]

    def audit(self, accounts: Sequence[Account], tally: Counter[str]) -> list[str]:
        return _Questions(self.plan, accounts, tally).run()

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


class _Questions:
    """The questions of a round, from all journals."""

    def __init__(self, plan: Round, accounts: Sequence[Account], tally: Counter[str]) -> None:
        self.plan = plan
        self.accounts = accounts
        self.tally = tally
        self.problems: list[str] = []
        self.orders = plan.orders
        self.asked: dict[int, Account] = {}
        self.ends: dict[int, list[Ended]] = {}
        self.heard: dict[int, list[str]] = defaultdict(list)  # by whom
        self.answered = Counter[int]()
        for account in self.accounts:
            for event in account.events:
                match event:
                    case Began():
                        self.asked[event.key] = account
                        self.ends[event.key] = []
                    case Ended():
                        self.ends[event.key].append(event)
                    case Heard():
                        self.heard[event.key].append(account.name)
                    case AnswerSent():
                        self.answered[event.key] += 1
                    case Broken():
                        self.problems.append(f"{account.name}: {event.text}")
                    case _:
                        self.problems.append(f"{account.name} wrote {event}")

    def run(self) -> list[str]:
        """Account for every question, and return the problems."""
        for key, account in self.asked.items():
            problem = self._account(account, self.orders[key])
            if problem:
                self.problems.append(f"question {key} of {account.name}: {problem}")
        strange = (self.heard.keys() | self.answered.keys()) - self.asked.keys()
        self.problems += [f"question {key} was heard, and never asked" for key in strange]
        return self.problems

    def _account(self, account: Account, order: Order) -> str:
        by, answered, ends = self.heard[order.key], self.answered[order.key], self.ends[order.key]
        if len(by) > 1:
            self.tally[f"questions heard more than once ({order.how})"] += 1
        most = self._may_be_heard(account, order)
        if len(by) > most or answered > 1 or len(ends) > 1:
            return f"heard by {by}, answered {answered} times, ended as {ends}: {order}"
        if answered and (order.how == "one-way" or order.wish not in _ANSWERED):
            return f"a client accepted an answer that was not due: {order}"
        if not ends:
            self.tally["questions whose client was killed"] += 1
            return "" if account.is_killed else "it never ended"
        how, text = ends[0].how, ends[0].text
        if how != "whole":
            self.tally[f"questions ended with {how}"] += 1
            is_explained = self._may_raise(account, order, how, text)
            return "" if is_explained else f"nothing explains its {how}: {text}; {order}"
        if order.how == "one-way":
            self.tally["questions one-way, heard" if by else "one-way, lost"] += 1
            is_lost = not by and not self._may_disappear(account)
            return "it was sent and never received, and no process was lost" if is_lost else ""
        self.tally["questions answered"] += 1
        if order.wish not in _ANSWERED:
            return f"it was answered, though its handler had to {order.wish}"
        return "" if by else "it was answered, and no server received it"

    def _may_be_heard(self, account: Account, order: Order) -> int:
        """Return how many servers may take a question: one, unless it may be repeated."""
        may_repeat = order.how == "idempotent" and (order.wish == "drop" or self._may_lose(account))
        return 1 + may_repeat

    def _may_lose(self, account: Account) -> bool:
        """Return whether a connection of a client may have ended, other than by being closed."""
        servers = range(SLOTS, SLOTS + len(self.plan.takers))
        return (
            self.plan.ends_a_taker
            or bool(self.plan.of(RESOURCES))
            or any(may_end_by_silence(self.plan, self.accounts, (account.slot, one)) for one in servers)
        )

    def _may_disappear(self, account: Account) -> bool:
        """Return whether a message that was sent may be lost, with its client or with the server."""
        plan = self.plan
        has_gone = account.is_killed or plan.has(account.slot, (FaultKind.CLOSE,))
        # Between machines, a message that was sent is not sent again: its server may have taken it.
        is_unknown = plan.is_remote and self._may_lose(account)
        return has_gone or plan.ends_a_taker or bool(plan.of(RESOURCES)) or is_unknown

    def _may_raise(self, account: Account, order: Order, how: str, text: str) -> bool:
        """Return whether the order or the plan explains an error of a request."""
        plan, slot = self.plan, account.slot
        several = len(order.counts) > 1
        match how:
            case "cancelled":
                return order.is_cancelled
            case "ClosedError":
                return plan.has(slot, (FaultKind.CLOSE,))
            case "PeerLostError" if "discarded this message" in text:
                return False  # another server has to get what a closing server has not taken
            case "PeerLostError":
                was_dropped = order.wish == "drop" and order.how != "one-way"
                return (was_dropped and "dropped without an answer" in text) or self._may_lose(account)
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
            case "OSError":
                return plan.has(slot, RESOURCES)
        return False
