"""The statistics of a sender."""

from aiotensor.sending.grants import Grants
from aiotensor.sending.settings import Settings
from aiotensor.statistics.counters import ErrorCounter, WaitCounter, snapshot
from aiotensor.types import SenderStatistics

__all__ = ["statistics_before_opening", "statistics_of"]


def statistics_of(grants: Grants, counts: dict[str, int], errors: ErrorCounter) -> SenderStatistics:
    """Return the current usage of a sender, and its totals since opening.

    Args:
        grants: its permits and memory.
        counts: its counters.
        errors: the errors of its calls.
    """
    memory = grants.memory
    permits, budget = grants.permits.budget, memory.gate.budget
    return snapshot(
        SenderStatistics,
        counts,
        max_concurrent_videos=permits.limit,
        in_flight=permits.in_use,
        peak_in_flight=permits.peak,
        waiting=permits.waiting + budget.waiting + len(memory.waiting_since),
        longest_wait_s=grants.holders.longest_wait_s(),
        holders=tuple(grants.holders.list()),
        arena_bytes=budget.limit,
        bytes_in_use=budget.in_use,
        peak_bytes_in_use=budget.peak,
        warm_bytes=memory.warm_bytes,
        largest_free_bytes=memory.largest_free,
        permit_waits=grants.permits.waited.waits(),
        memory_waits=memory.gate.waited.waits(),
        errors=errors.counts(),
    )


def statistics_before_opening(settings: Settings, errors: ErrorCounter) -> SenderStatistics:
    """Return the statistics of a sender that was never opened."""
    waits = WaitCounter().waits()
    return snapshot(
        SenderStatistics,
        dict.fromkeys(SenderStatistics.__struct_fields__, 0),
        max_concurrent_videos=settings.max_messages,
        longest_wait_s=0.0,
        holders=(),
        arena_bytes=settings.max_bytes,
        largest_free_bytes=settings.max_bytes,
        permit_waits=waits,
        memory_waits=waits,
        errors=errors.counts(),
    )
