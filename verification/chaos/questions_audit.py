"""The audit of a round of questions: each ended once, with its answer or with an error that is explained."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from verification.chaos.audit import RESOURCES, Account, Tally
from verification.chaos.journal import Began, Broken, Ended, Heard, Replied
from verification.chaos.plan import ANSWERED_BY_SENDER, ASKS_BY_SENDER, FaultKind, Order, Round

__all__ = ["Questions", "audit_questions"]

# The errors that `RemoteError` may name without a fault, by the wish. `serve` raises instead of dropping.
_REMOTE = {"answer": set[str](), "raise": {"HandlerError"}, "drop": {"HandlerError"}}


class Questions:
    """The questions of a round, from all journals.

    Args:
        plan: the plan of the round.
        accounts: the accounts of all processes that took part in it.
    """

    def __init__(self, plan: Round, accounts: Iterable[Account]) -> None:
        self.plan = plan
        self.problems: list[str] = []
        self.orders = {order.key: order for one in plan.senders for part in one.parts for order in part}
        self.asked: dict[int, Account] = {}
        self.ends: dict[int, list[Ended]] = {}
        self.heard: dict[int, list[str]] = defaultdict(list)  # by whom
        self.replied = Counter[int]()
        for account in accounts:
            for event in account.events:
                match event:
                    case Began():
                        self.asked[event.key] = account
                        self.ends[event.key] = []
                    case Ended():
                        self.ends[event.key].append(event)
                    case Heard():
                        self.heard[event.key].append(account.name)
                    case Replied():
                        self.replied[event.key] += 1
                    case Broken():
                        self.problems.append(f"{account.name}: {event.text}")
                    case _:
                        self.problems.append(f"{account.name} wrote {event}")

    def run(self, tally: Tally) -> list[str]:
        """Account for every question, and return the problems."""
        for key, account in self.asked.items():
            problem = self._account(account, self.orders[key], tally)
            if problem:
                self.problems.append(f"question {key} of {account.name}: {problem}")
        strange = (self.heard.keys() | self.replied.keys()) - self.asked.keys()
        self.problems += [f"question {key} was heard, and never asked" for key in strange]
        return self.problems

    def _account(self, account: Account, order: Order, tally: Tally) -> str:
        by, replied, ends = self.heard[order.key], self.replied[order.key], self.ends[order.key]
        heard = len(by)
        if heard > 1 or replied > 1 or len(ends) > 1:
            return f"heard {heard} times, by {by}, answered {replied} times, ended as {ends}"
        if replied and (order.how == "one-way" or order.wish != "answer"):
            return f"a client accepted an answer that was not due: {order}"
        if not ends:
            tally.questions["whose client was killed"] += 1
            return "" if account.is_killed else "it never ended"
        how, text = ends[0].how, ends[0].text
        if how != "whole":
            tally.questions[f"ended with {how}"] += 1
            is_explained = _was_dropped(order, how, text) or self.may_raise(account, order, how, text)
            return "" if is_explained else f"nothing explains its {how}: {text}; {order}"
        if order.how == "one-way":
            tally.questions["one-way, heard" if heard else "one-way, lost"] += 1
            is_lost = not heard and not self.may_be_lost(account)
            return "it was sent and never received, and no process was lost" if is_lost else ""
        tally.questions["answered"] += 1
        if order.wish != "answer":
            return f"it was answered, though its handler had to {order.wish}"
        return "" if heard else "it was answered, and no server received it"

    def may_be_lost(self, account: Account) -> bool:
        """Return whether a message may be lost with its client or with the server."""
        plan = self.plan
        return (
            plan.ends_the_receiver
            or account.is_killed
            or plan.has(account.slot, (FaultKind.CLOSE,))  # messages beyond the limits of the server are lost
            or plan.has(None, RESOURCES)
            or plan.has(account.slot, RESOURCES)
        )

    def may_raise(self, account: Account, order: Order, how: str, text: str) -> bool:
        """Return whether the order or the plan explains an error of a request."""
        plan, slot = self.plan, account.slot
        starved = plan.has(None, RESOURCES) or plan.has(slot, RESOURCES)
        match how:
            case "cancelled":
                return order.fate == "cancel"
            case "ClosedError":
                return plan.has(slot, (FaultKind.CLOSE,))
            case "PeerLostError" | "RefusedError":
                return plan.ends_the_receiver or account.is_new or starved
            case "RemoteError":
                name = text.partition(":")[0]
                if order.how != "one-way" and name in _REMOTE[order.wish]:
                    return True
                if name == "WouldBlockError":  # answers that wait for each other's memory
                    return len(order.answer) > 1 and slot in ANSWERED_BY_SENDER
                return starved and name in ("OSError", "PeerLostError", "RefusedError", "DiscardedError")
            case "WouldBlockError":  # questions that wait for each other's memory
                return len(order.counts) > 1 and slot in ASKS_BY_SENDER
            case "OSError":
                return plan.has(slot, RESOURCES)
        return False


def _was_dropped(order: Order, how: str, text: str) -> bool:
    is_report = how == "PeerLostError" and "dropped without a reply" in text
    return is_report and order.wish == "drop" and order.how != "one-way"


def audit_questions(plan: Round, accounts: Iterable[Account], tally: Tally) -> list[str]:
    """Account for every question of a round.

    Args:
        plan: the plan of the round.
        accounts: the accounts of all processes that took part in it.
        tally: the outcomes of the questions so far; updated.

    Returns:
        the problems.
    """
    return Questions(plan, accounts).run(tally)
