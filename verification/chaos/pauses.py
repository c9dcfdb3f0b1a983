"""Measure how long a process was suspended, and decide whether its silence has ended a connection."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from verification.chaos.plan import PEER_TIMEOUT_S, FaultKind, Round

__all__ = ["Pauses", "may_end_by_silence"]

_EVERY_S = 0.02

# Heartbeats allow a silence of `PEER_TIMEOUT_S`. A stopped process is silent for a little longer than it is
# stopped.
_SILENT_S = 0.75 * PEER_TIMEOUT_S

# The kernel waits for 0.2 s before it repeats a lost packet, and each time twice as long as before: after so
# short a cut it succeeds within 0.6 s.
_CUT_S = 0.25 * PEER_TIMEOUT_S


class Pauses:
    """Measure the pauses of this process in a thread, until it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._longest_s = 0.0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="pauses", daemon=True)
        self._thread.start()

    def longest_s(self) -> float:
        """Return the longest pause since the last call, in seconds."""
        with self._lock:
            longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._thread.join()

    def _measure(self) -> None:
        began = time.monotonic()
        while not self._is_closed.wait(_EVERY_S):
            ended = time.monotonic()
            with self._lock:
                self._longest_s = max(self._longest_s, ended - began)
            began = ended


class _Paused(Protocol):
    """The record of one process in a round."""

    @property
    def slot(self) -> int: ...
    @property
    def paused_s(self) -> float: ...


def may_end_by_silence(plan: Round, accounts: Iterable[_Paused], slots: Sequence[int]) -> bool:
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
