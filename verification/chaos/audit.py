"""The audit of a round: each tensor was taken once, or discarded, or lost with an error."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from verification.chaos.journal import Answered, Began, Broken, Dropped, Ended, Event, Sent, Taken, Withdrawn
from verification.chaos.pauses import may_end_by_silence
from verification.chaos.plan import MAX_TENSORS, RESOURCES, SLOTS, FaultKind, Round

__all__ = ["Account", "Tally", "audit"]


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


class Tally(msgspec.Struct):
    """The outcomes of the tensors of a run."""

    taken: int = 0
    discarded: int = 0
    lost: int = 0
    unsent: int = 0  # their send raised, or was cancelled
    unknown: int = 0  # their sender was killed before it knew
    errors: Counter[str] = msgspec.field(default_factory=Counter)
    questions: Counter[str] = msgspec.field(default_factory=Counter)
    publications: Counter[str] = msgspec.field(default_factory=Counter)


class _Message:
    """One message, as recorded in all journals."""

    def __init__(self, account: Account, tensors: int) -> None:
        self.account = account
        self.tensors = tensors
        self.end: Ended | None = None
        self.handles: dict[int, Sent] = {}
        self.is_withdrawn = False


class _Audit:
    def __init__(self, plan: Round, accounts: Iterable[Account], dropped: set[tuple[str, int]]) -> None:
        self.plan = plan
        self.problems: list[str] = []
        self.messages: dict[int, _Message] = {}
        self.taken: dict[int, list[Taken]] = defaultdict(list)
        self.answers: dict[tuple[str, int, int], str] = {}
        self.dropped = dropped
        self.accounts = list(accounts)
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
            case Withdrawn():
                self.messages[event.key].is_withdrawn = True
            case Taken():
                self.taken[event.token].append(event)
            case Dropped():
                self.dropped.add((event.sender, event.message))
            case Answered():
                self.answers[event.sender, event.message, event.tensor] = event.error
            case Broken():
                self.problems.append(f"{account.name}: {event.text}")

    def run(self, tally: Tally) -> list[str]:
        for key, message in self.messages.items():
            for index in range(message.tensors):
                problem = self._account(message, index, self.taken.pop(key + index, []), tally)
                if problem:
                    where = f"message {key} of {message.account.name}, tensor {index} of {message.tensors}"
                    self.problems.append(f"{where}: {problem}")
        self.problems += [f"taken, but never sent: {taken}" for taken in self.taken.values()]
        return self.problems

    def _account(self, message: _Message, index: int, taken: list[Taken], tally: Tally) -> str:
        handle, end = message.handles.get(index), message.end
        if len(taken) > 1:
            return f"taken {len(taken)} times: {taken}"
        if taken and handle is not None:
            got = taken[0]
            if (got.sender, got.message, got.tensor) != (handle.sender, handle.message, handle.tensor):
                return f"sent as {handle}, taken as {got}"
        if end is None:
            if not message.account.is_killed:
                return "its send never ended"
            tally.unknown += not taken
            tally.taken += len(taken)
            return ""
        if end.how != "whole":
            return self._unsent(message, end, taken, tally)
        if taken:
            tally.taken += 1
            return self._answered_twice(message, handle, taken[0])
        return self._untaken(message, handle, tally)

    def _unsent(self, message: _Message, end: Ended, taken: list[Taken], tally: Tally) -> str:
        tally.errors[end.how] += 1
        if taken and end.how != "cancelled":
            return f"its send raised {end.how} ({end.text}), and it was taken: {taken[0]}"
        tally.taken += len(taken)
        tally.unsent += not taken
        if not self._may_raise(message, end.how):
            return f"nothing that happened in this round explains its {end.how}: {end.text}"
        return ""

    def _answered_twice(self, message: _Message, handle: Sent | None, taken: Taken) -> str:
        """Return a problem with the error of a second request for a tensor that was taken, or ""."""
        error = self.answers.get((taken.sender, taken.message, taken.tensor), "AlreadyTakenError")
        allowed = {"AlreadyTakenError"}
        if message.is_withdrawn or (taken.sender, taken.message) in self.dropped:
            allowed |= {"DiscardedError"}  # like the rest of its message
        if self._may_be_lost(message, handle):
            allowed |= {"PeerLostError", "RefusedError"}
        return "" if error in allowed else f"taken as {taken}, and asking again raised {error}"

    def _untaken(self, message: _Message, handle: Sent | None, tally: Tally) -> str:
        if handle is None:
            return "it was sent, without a handle"
        error = self.answers.get((handle.sender, handle.message, handle.tensor))
        if message.is_withdrawn or (handle.sender, handle.message) in self.dropped:
            tally.discarded += 1
            allowed = {"DiscardedError"}
        else:
            tally.lost += 1
            allowed = set[str]()
        if self._may_be_lost(message, handle):
            allowed |= {"PeerLostError", "RefusedError"}
        if not allowed:
            return (
                f"it was sent as {handle} and is lost ({error}), though no connection ended since: "
                f"{handle.losses} losses when it was sent, {message.account.losses} in the end"
            )
        if error is not None and error not in allowed:
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
        was_closed = self.plan.has(account.slot, (FaultKind.CLOSE,))
        return was_closed and (self.plan.has(SLOTS, RESOURCES) or self.plan.has_partition)

    def _may_raise(self, message: _Message, error: str) -> bool:
        """Return whether the plan explains an error of a send."""
        plan, slot, account = self.plan, message.account.slot, message.account
        match error:
            case "cancelled" | "given up" | "WouldBlockError" | "UnavailableError":
                return True
            case "DiscardedError":
                return bool(self.dropped)
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


def audit(plan: Round, accounts: Iterable[Account], dropped: set[tuple[str, int]], tally: Tally) -> list[str]:
    """Account for every tensor of a round.

    Args:
        plan: the plan of the round.
        accounts: the accounts of all its processes.
        dropped: the messages that the receiver discards, some perhaps in a later round; updated.
        tally: the outcomes of the tensors so far; updated.

    Returns:
        the problems.
    """
    return _Audit(plan, accounts, dropped).run(tally)
