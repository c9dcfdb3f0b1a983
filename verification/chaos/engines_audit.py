"""The audit of a round of questions to several engines: at most one engine received each question."""

from collections.abc import Iterable, Sequence

from verification.chaos.audit import Account, Tally
from verification.chaos.plan import SLOTS, FaultKind, Order, Round
from verification.chaos.questions_audit import Questions

__all__ = ["audit_engines", "wrong_with_refusals"]

_ENDS = (FaultKind.KILL, FaultKind.CLOSE)
_SILENT_MS = 250  # heartbeats allow at least 400, and a process needs a moment to continue

_PAUSED_S = 1.75  # heartbeats allow 2 s; SIGSTOP lasts at most 1.5 s and affects only its target

_REFUSALS = 2  # an immediate refusal, and an early one when an engine ends


class _EngineQuestions(Questions):
    def __init__(self, plan: Round, accounts: Iterable[Account], paused_s: float) -> None:
        super().__init__(plan, accounts)
        self.paused_s = paused_s

    def may_be_lost(self, account: Account) -> bool:
        return account.is_killed or self._has(account, FaultKind.CLOSE) or self._may_lose_engine(account)

    def may_raise(self, account: Account, order: Order, how: str, text: str) -> bool:
        if how == "PeerLostError":
            return self._may_lose_engine(account)
        if how in ("RefusedError", "OSError", "WouldBlockError"):  # no limits, no shortages
            return False
        return super().may_raise(account, order, how, text)

    def _has(self, account: Account, kind: FaultKind) -> bool:
        return self.plan.has(account.slot, (kind,))

    def _may_lose_engine(self, account: Account) -> bool:
        """Return whether a connection of a client may have ended, other than by being closed."""
        return self.paused_s > _PAUSED_S or any(
            fault.kind is FaultKind.PARTITION
            or (fault.kind in _ENDS and fault.target is not None and fault.target >= SLOTS)
            or (
                fault.kind is FaultKind.STOP
                and fault.for_ms > _SILENT_MS
                and self._concerns(fault.target, account)
            )
            for fault in self.plan.faults
        )

    def _concerns(self, target: int | None, account: Account) -> bool:
        return target == account.slot or (target is not None and target >= SLOTS)


def audit_engines(plan: Round, accounts: Iterable[Account], tally: Tally, paused_s: float = 0.0) -> list[str]:
    """Account for every question of a round; see `audit_questions`.

    Args:
        plan: the plan of the round.
        accounts: the accounts of all processes that took part in it.
        tally: counts how the questions ended.
        paused_s: the longest time for which one of them was paused because the machine was busy.
    """
    return _EngineQuestions(plan, accounts, paused_s).run(tally)


def wrong_with_refusals(lines: Sequence[str], seconds: float) -> list[str]:
    """Return a problem if a process logged more than one line per second about refused connections."""
    refusals = sum("a connection was refused because" in line for line in lines)
    allowed = _REFUSALS + seconds
    return [f"logged {refusals} refusals in {seconds:.1f} s"] if refusals > allowed else []
