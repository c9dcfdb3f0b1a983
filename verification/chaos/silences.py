"""Heartbeats, which end a connection between two living processes if one of them is silent for long."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from verification.chaos.plan import PEER_TIMEOUT_S, FaultKind, Round

__all__ = ["may_end_by_silence"]

# Heartbeats allow a silence of `PEER_TIMEOUT_S`. A stopped process is silent for a little longer than it is
# stopped.
_SILENT_S = 0.75 * PEER_TIMEOUT_S

# The kernel waits for 0.2 s before it repeats a lost packet, and each time twice as long as before: after so
# short a cut it succeeds within 0.6 s.
_CUT_S = 0.25 * PEER_TIMEOUT_S


class _Paused(Protocol):
    """The record of one process in a round."""

    @property
    def slot(self) -> int | None: ...
    @property
    def paused_s(self) -> float: ...


def may_end_by_silence(plan: Round, accounts: Iterable[_Paused], slots: Sequence[int | None]) -> bool:
    """Return whether heartbeats may have ended a connection.

    Args:
        plan: the plan of the round.
        accounts: the accounts of all processes that took part in it; a busy machine may have paused them.
        slots: the slots of the processes at both ends of the connection.
    """
    if not plan.kind.has_timeout:
        return False
    cut_ms = sum(fault.for_ms for fault in plan.faults if fault.kind is FaultKind.PARTITION)
    stopped_ms = sum(
        fault.for_ms for fault in plan.faults if fault.kind is FaultKind.STOP and fault.target in slots
    )
    paused_s = max((account.paused_s for account in accounts if account.slot in slots), default=0.0)
    return cut_ms > 1000 * _CUT_S or max(stopped_ms / 1000, paused_s) > _SILENT_S
