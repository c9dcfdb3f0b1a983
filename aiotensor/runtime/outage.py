"""The time for which no peer is connected: its limit, and the log of it."""

import asyncio
from collections.abc import Callable

from aiotensor.runtime.logs import logger_of

logger = logger_of("transports")

# The time without a peer after which it is logged, and those between further lines.
_FIRST_LINE_S, _NEXT_LINE_S, _LAST_LINE_S = 10.0, 60.0, 3600.0


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


class Absence:
    """Log that calls wait for a peer, and why: after 10 s, and then at growing intervals of minutes.

    Belongs to the running loop.

    Args:
        address: the address of the peer, or the one to which it has to connect.
        reason: returns the reason for the wait; "" if no call waits.
    """

    def __init__(self, address: str, reason: Callable[[], str]) -> None:
        self._address = address
        self._reason = reason
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to measure, unless that has begun already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FIRST_LINE_S, self._log, _NEXT_LINE_S)

    def end(self) -> None:
        """Stop, because a peer was reached, or none is needed any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _log(self, interval: float) -> None:
        loop = asyncio.get_running_loop()
        reason = self._reason()
        if not reason:
            self._timer = loop.call_later(_FIRST_LINE_S, self._log, interval)
            return
        logger.warning(
            "waiting for a peer at %s: %s",
            self._address,
            reason,
            extra={"event": "peer_missing", "address": self._address, "reason": reason},
        )
        self._timer = loop.call_later(interval, self._log, min(2 * interval, _LAST_LINE_S))
