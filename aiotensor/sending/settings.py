"""The limits of a sender, as its constructor received them."""

from typing import NamedTuple

__all__ = ["Settings", "WaitLimits"]


class WaitLimits(NamedTuple):
    """Limits on waiting times in seconds; None for never.

    Attributes:
        long_wait_s: the time after which a wait is logged.
        max_wait_s: the time after which a wait ends with an error.
    """

    long_wait_s: float | None
    max_wait_s: float | None


class Settings(NamedTuple):
    """The limits of a sender.

    Attributes:
        max_messages: the number of permits.
        max_bytes: the limit of shared memory in bytes.
        keep_warm_s: the idle time in seconds after which memory is returned to the system; None for never.
        wait_limits: the limits on waiting times.
    """

    max_messages: int
    max_bytes: int
    keep_warm_s: float | None
    wait_limits: WaitLimits
