"""The limits of a pipe."""

from typing import NamedTuple

__all__ = ["KEEP_WARM_S", "LONG_WAIT_S", "PipeSettings"]

KEEP_WARM_S = 30.0  # after which idle memory is returned to the system
LONG_WAIT_S = 10.0  # after which a wait is logged


class PipeSettings(NamedTuple):
    """The limits of a pipe.

    Attributes:
        max_bytes: the limit on the bytes in flight, in each direction.
        max_wait_s: the seconds after which a wait ends with an error; None for no limit.
    """

    max_bytes: int
    max_wait_s: float | None
