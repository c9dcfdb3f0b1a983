"""The limits of a sender."""

from typing import NamedTuple, Self

from aiotensor.runtime.arguments import count, grace_period, seconds_or_never

__all__ = ["Settings"]


class Settings(NamedTuple):
    """The limits of a sender.

    Attributes:
        max_messages: the number of permits.
        max_bytes: the maximum number of bytes of shared memory in use.
        keep_warm_s: the idle time in seconds after which memory is returned to the system; None for never.
        long_wait_s: the time in seconds after which a wait is logged; None for never.
        max_wait_s: the time in seconds after which a wait ends with an error; None for never.
        grace_s: the time in seconds without a receiver after which no call waits; None for no limit.
    """

    max_messages: int
    max_bytes: int
    keep_warm_s: float | None
    long_wait_s: float | None
    max_wait_s: float | None
    grace_s: float | None

    @classmethod
    def checked(
        cls,
        max_concurrent_videos: int,
        arena_bytes: int,
        keep_warm_s: float | None,
        long_wait_s: float | None,
        max_wait_s: float | None,
        grace_s: float | None,
    ) -> Self:
        """Validate the limits that `TensorSender` received, and return them.

        Raises:
            TypeError: a limit has the wrong type.
            ValueError: a limit is out of bounds.
        """
        return cls(
            count("max_concurrent_videos", max_concurrent_videos),
            count("arena_bytes", arena_bytes),
            seconds_or_never("keep_warm_s", keep_warm_s),
            seconds_or_never("long_wait_s", long_wait_s),
            seconds_or_never("max_wait_s", max_wait_s),
            grace_period(grace_s),
        )
