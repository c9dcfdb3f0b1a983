"""The limits of a sender, as its constructor received them."""

from typing import NamedTuple

__all__ = ["Settings"]


class Settings(NamedTuple):
    """The limits of a sender.

    Attributes:
        max_messages: the number of permits.
        max_bytes: the limit of shared memory in bytes.
        keep_warm_s: the idle time in seconds after which memory is returned to the system; None for never.
        long_wait_s: the time in seconds after which a wait is logged; None for never.
        max_wait_s: the time in seconds after which a wait ends with an error; None for never.
    """

    max_messages: int
    max_bytes: int
    keep_warm_s: float | None
    long_wait_s: float | None
    max_wait_s: float | None
