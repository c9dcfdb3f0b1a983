"""The time for which no peer is connected, and its limit."""

import asyncio
from collections.abc import Callable

__all__ = ["Outage"]


class Outage:
    """Notice when a peer has been unavailable for longer than a grace period; belongs to the running loop.

    Args:
        grace_s: the grace period in seconds, from 0; None for no limit.
        on_too_long: called when the period has passed.

    Attributes:
        is_too_long: whether the peer is unavailable, and has been for longer than the grace period.
    """

    def __init__(self, grace_s: float | None, on_too_long: Callable[[], object]) -> None:
        self.is_too_long = False
        self._grace_s = grace_s
        self._on_too_long = on_too_long
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to measure, unless that has begun already."""
        if self._grace_s is None or self.is_too_long or self._timer is not None:
            return
        if self._grace_s:
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._expire)
        else:
            self._expire()

    def end(self) -> None:
        """Stop, because a peer is available, or none is needed any more."""
        self.is_too_long = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self.is_too_long = True
        self._on_too_long()
