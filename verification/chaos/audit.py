"""The audit of a round: each message ended as the plan explains, and each tensor was taken once, or lost."""

import abc
from collections import Counter, defaultdict
from collections.abc import Sequence

from verification.chaos.family import Member
from verification.chaos.journal import Answered, Began, Broken, Ended, Event, Key, Sent, Taken
from verification.chaos.plan import PEER_TIMEOUT_S, RESOURCES, SLOTS, FaultKind, Order, Round

# Heartbeats allow a silence of `PEER_TIMEOUT_S`. A stopped process is silent for a little longer than it is
# stopped.
_SILENT_S = 0.75 * PEER_TIMEOUT_S


class Audit(abc.ABC):
    """The parts that the audits of all kinds of work share.

    Args:
        plan: the plan of the round.
        members: all processes that took part in it.
        tally: the counted outcomes; updated.

    Attributes:
        what: the name of a message in the problems.
    """

    what = "message"

    def __init__(self, plan: Round, members: Sequence[Member], tally: Counter[str]) -> None:
        self.plan = plan
        self.members = members
        self.tally = tally
        self.problems: list[str] = []
        self.begun: dict[int, Member] = {}
        self.ends: dict[int, Ended] = {}

    def run(self) -> list[str]:
        """Account for every message, and return the problems."""
        for member in self.members:
            for event in member.events():
                match event:
                    case Began():
                        self.begun[event.key] = member
                    case Ended():
                        if event.key in self.ends:
                            self.problems.append(f"{member.name}: {event.key} ended twice")
                        self.ends[event.key] = event
                    case Broken():
                        self.problems.append(f"{member.name}: {event.text}")
                    case _:
                        self.note(member, event)
        orders = self.plan.orders
        for key, member in self.begun.items():
            problem = self.check(member, orders[key], self.ends.get(key))
            if problem:
                self.problems.append(f"{self.what} {key} of {member.name}: {problem} {orders[key]}")
        self.check_others()
        return self.problems

    def note(self, member: Member, event: Event) -> None:
        """Note an event of this kind of work."""
        self.problems.append(f"{member.name} wrote {event}")

    @abc.abstractmethod
    def check(self, member: Member, order: Order, end: Ended | None) -> str:
        """Return the problem with the outcome of an order, or ""."""

    def check_others(self) -> None:  # noqa: B027 - optional
        """Check the events that belong to no order."""

    def may_raise(self, member: Member, order: Order, end: Ended) -> bool:
        """Return whether the order or the plan explains an error of its call."""
        match end.how:
            case "cancelled":
                return order.is_cancelled
            case "ClosedError":
                return self.plan.has(member.slot, (FaultKind.CLOSE,))
            case "OSError":
                return self.plan.has(member.slot, RESOURCES)
        return False

    def may_end_by_silence(self, *slots: int) -> bool:
        """Return whether heartbeats may have ended the connection of the processes in two slots.

        The plan may have stopped one of them, or a busy machine may have paused it.
        """
        if not self.plan.is_remote:
            return False
        stops = [fault for fault in self.plan.of((FaultKind.STOP,)) if fault.target in slots]
        paused_s = max((member.paused_s for member in self.members if member.slot in slots), default=0.0)
        return max(sum(fault.for_ms for fault in stops) / 1000, paused_s) > _SILENT_S


class TensorsAudit(Audit):
    """The audit of senders and a receiver."""

    def __init__(self, plan: Round, members: Sequence[Member], tally: Counter[str]) -> None:
        super().__init__(plan, members, tally)
        self.sent: dict[int, Sent] = {}  # by their tokens
        self.taken: dict[int, list[Taken]] = defaultdict(list)
        self.answers: dict[Key, str] = {}

    def note(self, member: Member, event: Event) -> None:
        match event:
            case Sent():
                self.sent[event.token] = event
            case Taken():
                self.taken[event.token].append(event)
            case Answered():
                self.answers[event.handle] = event.error
            case _:
                super().note(member, event)

    def check_others(self) -> None:
        orders = [order for key, order in self.plan.orders.items() if key in self.begun]
        sent = {order.key + index for order in orders for index, _ in enumerate(order.counts)}
        self.problems += [f"taken, but never sent: {self.taken[one]}" for one in self.taken.keys() - sent]

    def check(self, member: Member, order: Order, end: Ended | None) -> str:
        tokens = range(order.key, order.key + len(order.counts))
        return "; ".join(filter(None, [self._check(member, order, end, token) for token in tokens]))

    def _check(self, member: Member, order: Order, end: Ended | None, token: int) -> str:
        sent, taken = self.sent.get(token), self.taken[token]
        if len(taken) > 1:
            return f"taken {len(taken)} times: {taken}"
        if taken:
            self.tally["tensors taken"] += 1
            if sent is not None and sent.handle != taken[0].handle:
                return f"sent as {sent}, taken as {taken[0]}"
        if end is None:
            self.tally["tensors whose sender was killed"] += 1
            return "" if member.is_killed else "its send never ended"
        if end.how != "whole":
            self.tally[f"tensors whose send ended with {end.how}"] += 1
            if taken and end.how != "cancelled":
                return f"its send raised {end.how} ({end.text}), and it was taken: {taken[0]}"
            is_explained = self.may_raise(member, order, end)
            return "" if is_explained else f"nothing explains its {end.how}: {end.text}"
        if taken:
            error = self.answers.get(taken[0].handle, "AlreadyTakenError")
            is_lost = error in ("PeerLostError", "RefusedError") and self._may_be_lost(member, sent)
            is_right = error == "AlreadyTakenError" or is_lost
            return "" if is_right else f"taken as {taken[0]}, and asking again raised {error}"
        if sent is None:
            return "it was sent, without a handle"
        self.tally["tensors lost"] += 1
        error = self.answers.get(sent.handle, "PeerLostError")
        if not self._may_be_lost(member, sent):
            losses = f"{sent.losses} losses when it was sent, {member.losses} in the end"
            return f"{sent} is lost ({error}), though no connection ended since: {losses}"
        if error not in ("PeerLostError", "RefusedError"):
            return f"{sent} was not taken, and asking for it raised {error}"
        return ""

    def _may_be_lost(self, member: Member, sent: Sent | None) -> bool:
        """Return whether a connection ended after a tensor was sent."""
        if member.is_killed:
            return True
        if sent is not None and member.losses > sent.losses:
            return self._may_lose_receiver(member)
        # A sender that was closed before the loss of its receiver has not counted it.
        return self.plan.has(member.slot, (FaultKind.CLOSE,)) and self.plan.has(SLOTS, RESOURCES)

    def may_raise(self, member: Member, order: Order, end: Ended) -> bool:
        match end.how:
            case "WouldBlockError" | "UnavailableError":
                return True
            case "PeerLostError" | "RefusedError":
                return self._may_lose_receiver(member)
        return super().may_raise(member, order, end)

    def _may_lose_receiver(self, member: Member) -> bool:
        """Return whether the plan explains that a sender has lost its receiver."""
        plan, slot = self.plan, member.slot
        return (
            plan.ends_a_taker
            or member.is_new
            or plan.has(slot, (*RESOURCES, FaultKind.CLOSE))
            or plan.has(SLOTS, RESOURCES)
            or self.may_end_by_silence(slot, SLOTS)
        )
