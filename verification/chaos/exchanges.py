"""Rounds in which clients ask a server: the same plans with other processes and another audit."""

import asyncio
import contextlib
import os

from verification.chaos import answering, asking
from verification.chaos.audit import RESOURCES, Account, Tally
from verification.chaos.family import Family, GoneError, Member, ReceiversPart, SendersPart
from verification.chaos.plan import ANSWERED_BY_SENDER, ASKS_BY_SENDER, SenderPlan
from verification.chaos.questions_audit import audit_questions
from verification.chaos.rounds import Play

__all__ = ["ExchangeFamily", "ExchangePlay"]

_OUR_FILES = {"s", "m", *(f"back-{slot}" for slot in ANSWERED_BY_SENDER)}


class ExchangeFamily(Family):
    """A server and its clients."""

    sending: SendersPart = asking
    taking: ReceiversPart = answering

    def left_in_folder(self) -> list[str]:
        return [name for name in os.listdir(self._meeting) if name not in _OUR_FILES]

    async def probe(self, sender: Member, plan: SenderPlan) -> None:
        await sender.call(asking.probe)

    async def leave(self, member: Member) -> None:
        with contextlib.suppress(GoneError):
            await member.call(answering.leave if member is self.receiver else asking.leave)


class ExchangePlay(Play):
    """One round of questions and answers."""

    async def ask(self) -> None:
        """Do nothing: every answer was checked when it arrived."""

    async def settle(self, living: list[Member]) -> list[str]:
        settling = {sender.name: sender.call(asking.settle) for sender in living}
        settling[self.family.receiver.name] = self.family.receiver.call(answering.settle)
        found = await asyncio.gather(*settling.values())
        return [f"{name}: {wrong}" for name, wrongs in zip(settling, found, strict=True) for wrong in wrongs]

    def audit(self, accounts: list[Account], tally: Tally) -> list[str]:
        return audit_questions(self.plan, accounts, tally)

    def may_log(self, line: str, slot: int | None) -> bool:
        # A handler's error is logged with its traceback; the client also gets it, and the audit checks that.
        is_of_handler = "answering a request from process" in line or "Traceback" in line
        return is_of_handler or self.plan.has(None, RESOURCES) or super().may_log(line, slot)

    def segments(self, slot: int | None) -> int:
        if slot is None:
            return len(ANSWERED_BY_SENDER) + len(ASKS_BY_SENDER)
        return (slot in ASKS_BY_SENDER) + (slot in ANSWERED_BY_SENDER)
