"""The audit of a round: each tensor was taken once, or lost with an error."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from verification.chaos.journal import Answered, Began, Broken, Ended, Event, Sent, Taken
from verification.chaos.plan import MAX_TENSORS, PEER_TIMEOUT_S, RESOURCES, SLOTS, FaultKind, Round

# Heartbeats allow a silence of `PEER_TIMEOUT_S`. A stopped process is silent for a little longer than it is
# stopped.
_SILENT_S = 0.75 * PEER_TIMEOUT_S


class Account(msgspec.Struct):
    """The record of one process in a round.

    Attributes:
        name: the name of the process.
        slot: its target in the faults of a round.
        is_killed: whether it was killed in this round.
        events: its journal.
        losses: the number of lost receivers, as the process counts them at the end.
        is_new: whether it was started during the round.
        paused_s: its longest pause in seconds; 0 if that was not measured.
    """

    name: str
    slot: int
    is_killed: bool
    events: Sequence[Event]
    losses: int = 0
    is_new: bool = False
    paused_s: float = 0.0


def may_end_by_silence(plan: Round, accounts: Iterable[Account], slots: Sequence[int]) -> bool:
    """Return whether heartbeats may have ended a connection.

    Args:
        plan: the plan of the round.
        accounts: the accounts of all processes that took part in it; a busy machine may have paused them.
        slots: the slots of the processes at both ends of the connection.
    """
    if not plan.is_remote:
        return False
    stopped_ms = sum(fault.for_ms for fault in plan.of((FaultKind.STOP,)) if fault.target in slots)
    paused_s = max((account.paused_s for account in accounts if account.slot in slots), default=0.0)
    return max(stopped_ms / 1000, paused_s) > _SILENT_S


class _Message:
    """One message, as recorded in all journals."""

    def __init__(self, account: Account, tensors: int) -> None:
        self.account = account
        self.tensors = tensors
        self.end: Ended | None = None
        self.handles: dict[int, Sent] = {}


class _Audit:
    def __init__(self, plan: Round, accounts: Sequence[Account], tally: Counter[str]) -> None:
        self.plan = plan
        self.accounts = accounts
        self.tally = tally
        self.problems: list[str] = []
        self.messages: dict[int, _Message] = {}
        self.taken: dict[int, list[Taken]] = defaultdict(list)
        self.answers: dict[tuple[str, int, int], str] = {}
        for account in self.accounts:
            for event in account.events:
                self._note(account, event)

    def _note(self, account: Account, event: Event) -> None:
        match event:
            case Began():
                self.messages[event.key] = _Message(account, event.tensors)
            case Sent():
                index = event.token % MAX_TENSORS
                self.messages[event.token - index].handles[index] = event
            case Ended():
                self.messages[event.key].end = event
            case Taken():
                self.taken[event.token].append(event)
            case Answered():
                self.answers[event.sender, event.message, event.tensor] = event.error
            case Broken():
                self.problems.append(f"{account.name}: {event.text}")

    def run(self) -> list[str]:
        for key, message in self.messages.items():
            for index in range(message.tensors):
                problem = self._account(message, index, self.taken.pop(key + index, []))
                if problem:
                    where = f"message {key} of {message.account.name}, tensor {index} of {message.tensors}"
                    self.problems.append(f"{where}: {problem}")
        self.problems += [f"taken, but never sent: {taken}" for taken in self.taken.values()]
        return self.problems

    def _account(self, message: _Message, index: int, taken: list[Taken]) -> str:
        handle, end = message.handles.get(index), message.end
        if len(taken) > 1:
            return f"taken {len(taken)} times: {taken}"
        if taken:
            self.tally["tensors taken"] += 1
            got = taken[0]
            if handle is not None and (got.sender, got.message, got.tensor) != (
                handle.sender,
                handle.message,
                handle.tensor,
            ):
                return f"sent as {handle}, taken as {got}"
        if end is None:
            self.tally["tensors whose sender was killed"] += 1
            return "" if message.account.is_killed else "its send never ended"
        if end.how != "whole":
            return self._unsent(message, end, taken)
        if taken:
            return self._answered_twice(message, handle, taken[0])
        return self._untaken(message, handle)

    def _unsent(self, message: _Message, end: Ended, taken: list[Taken]) -> str:
        self.tally[f"tensors whose send ended with {end.how}"] += 1
        if taken and end.how != "cancelled":
            return f"its send raised {end.how} ({end.text}), and it was taken: {taken[0]}"
        if not self._may_raise(message, end.how):
            return f"nothing that happened in this round explains its {end.how}: {end.text}"
        return ""

    def _answered_twice(self, message: _Message, handle: Sent | None, taken: Taken) -> str:
        """Return a problem with the error of a second request for a tensor that was taken, or ""."""
        error = self.answers.get((taken.sender, taken.message, taken.tensor), "AlreadyTakenError")
        is_lost = error in ("PeerLostError", "RefusedError") and self._may_be_lost(message, handle)
        if error == "AlreadyTakenError" or is_lost:
            return ""
        return f"taken as {taken}, and asking again raised {error}"

    def _untaken(self, message: _Message, handle: Sent | None) -> str:
        if handle is None:
            return "it was sent, without a handle"
        self.tally["tensors lost"] += 1
        error = self.answers.get((handle.sender, handle.message, handle.tensor))
        if not self._may_be_lost(message, handle):
            return (
                f"it was sent as {handle} and is lost ({error}), though no connection ended since: "
                f"{handle.losses} losses when it was sent, {message.account.losses} in the end"
            )
        if error not in (None, "PeerLostError", "RefusedError"):
            return f"{handle} was not taken, and asking for it raised {error}"
        return ""

    def _may_be_lost(self, message: _Message, handle: Sent | None) -> bool:
        """Return whether a connection ended after a tensor was sent."""
        account = message.account
        if account.is_killed:
            return True
        if handle is not None and account.losses > handle.losses:
            return self._may_lose_receiver(account)
        # A sender that was closed before the loss of its receiver has not counted it.
        return self.plan.has(account.slot, (FaultKind.CLOSE,)) and self.plan.has(SLOTS, RESOURCES)

    def _may_raise(self, message: _Message, error: str) -> bool:
        """Return whether the plan explains an error of a send."""
        plan, slot, account = self.plan, message.account.slot, message.account
        match error:
            case "cancelled" | "WouldBlockError" | "UnavailableError":
                return True
            case "ClosedError":
                return plan.has(slot, (FaultKind.CLOSE,))
            case "OSError":
                return plan.has(slot, RESOURCES)
            case "PeerLostError" | "RefusedError":
                return self._may_lose_receiver(account)
        return False

    def _may_lose_receiver(self, account: Account) -> bool:
        """Return whether the plan explains that a sender has lost its receiver."""
        plan, slot = self.plan, account.slot
        return (
            plan.ends_a_taker
            or account.is_new
            or plan.has(slot, (*RESOURCES, FaultKind.CLOSE))
            or plan.has(SLOTS, RESOURCES)
            or may_end_by_silence(plan, self.accounts, (slot, SLOTS))
        )


def audit(plan: Round, accounts: Sequence[Account], tally: Counter[str]) -> list[str]:
    """Account for every tensor of a round, count the outcomes, and return the problems."""
    return _Audit(plan, accounts, tally).run()
