"""The limits of a publisher, as passed to its constructor."""

from typing import NamedTuple

from aiotensor.protocol.audience import SlowPolicy

__all__ = ["PublisherSettings"]


class PublisherSettings(NamedTuple):
    """The limits of a publisher.

    Attributes:
        max_bytes: the maximum number of bytes of shared memory.
        max_behind: the maximum number of publications that a subscriber may be behind.
        slow: the policy for subscribers that are `max_behind` publications behind.
        max_held_bytes: the maximum number of bytes that one subscriber may use; None for no limit.
        history: the number of publications kept for subscribers that connect later.
        max_subscribers: the maximum number of connected subscribers; None for no limit.
        keep_warm_s: the idle time in seconds after which memory is returned to the system; None for never.
        long_wait_s: the time in seconds after which a wait is logged; None for never.
        max_wait_s: the time in seconds after which a wait ends with an error; None for never.
    """

    max_bytes: int
    max_behind: int
    slow: SlowPolicy
    max_held_bytes: int | None
    history: int
    max_subscribers: int | None
    keep_warm_s: float | None
    long_wait_s: float | None
    max_wait_s: float | None
