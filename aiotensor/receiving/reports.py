"""The statistics of a receiver."""

from aiotensor.protocol.admission import AdmissionLimits
from aiotensor.receiving.intake import Intake
from aiotensor.statistics.counters import ErrorCounter, snapshot
from aiotensor.types import ReceiverStatistics

__all__ = ["statistics_before_opening", "statistics_of"]


def statistics_of(
    intake: Intake, limits: AdmissionLimits, counts: dict[str, int], errors: ErrorCounter
) -> ReceiverStatistics:
    """Return the current usage of a receiver, and its totals since opening.

    Args:
        intake: its connections and tensors.
        limits: its limits.
        counts: its counters.
        errors: the errors of its calls.
    """
    unclaimed, mappings = intake.mailbox.unclaimed, intake.mappings
    return snapshot(
        ReceiverStatistics,
        counts,
        senders=len(intake.senders),
        max_senders=limits.senders,
        waiting=intake.arrivals.waiting,
        unclaimed_tensors=unclaimed.tensors,
        unclaimed_bytes=unclaimed.nbytes,
        mapped_bytes=intake.mapped_bytes,
        max_mapped_bytes=limits.mapped_bytes,
        promised_messages=intake.promised_messages,
        max_unclaimed_messages=limits.unclaimed_messages,
        leases=mappings.leases,
        leased_bytes=mappings.leased_bytes,
        peak_leased_bytes=mappings.peak_leased_bytes,
        messages_discarded=intake.mailbox.messages_discarded,
        errors=errors.counts(),
    )


def statistics_before_opening(limits: AdmissionLimits, errors: ErrorCounter) -> ReceiverStatistics:
    """Return the statistics of a receiver that was never opened."""
    return snapshot(
        ReceiverStatistics,
        dict.fromkeys(ReceiverStatistics.__struct_fields__, 0),
        max_senders=limits.senders,
        max_mapped_bytes=limits.mapped_bytes,
        max_unclaimed_messages=limits.unclaimed_messages,
        errors=errors.counts(),
    )
