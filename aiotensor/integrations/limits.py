"""Limits on HTTP requests that use the engine: the rate of an upload, and the time until the response."""

import math
from dataclasses import dataclass

__all__ = [
    "LAST_CHANCE_S",
    "MIN_UPLOAD_RATE",
    "UPLOAD_GRACE_S",
    "OverdueError",
    "RequestLimits",
    "SlowUploadError",
    "UploadBudget",
]

# The defaults: below the rate of the slowest networks over which videos are uploaded, and above their usual
# stalls.
MIN_UPLOAD_RATE = 16 * 1024.0
UPLOAD_GRACE_S = 10.0

# The time in seconds to read bytes that arrived while the loop was blocked or the process was stopped.
LAST_CHANCE_S = 0.1


class OverdueError(TimeoutError):
    """The response had not begun at the deadline of the request."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(f"the response had not begun after {deadline_s:g} s")


class SlowUploadError(TimeoutError):
    """The client sent the body of a request too slowly."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on one request.

    Attributes:
        min_upload_rate: the minimum rate at which a client must send the body, in bytes per second; None for
            no limit.
        upload_grace_s: the longest allowed stall of an upload, in seconds.
        deadline_s: the time limit until the response begins, in seconds; None for no limit.

    Raises:
        ValueError: a limit is not positive.
    """

    min_upload_rate: float | None
    upload_grace_s: float
    deadline_s: float | None

    def __post_init__(self) -> None:
        for name in ("min_upload_rate", "upload_grace_s", "deadline_s"):
            value = getattr(self, name)
            has_no_limit = value is None and name != "upload_grace_s"
            if not has_no_limit and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")

    def upload_budget(self) -> "UploadBudget | None":
        """Return the budget for a new upload; None if uploads are not limited."""
        if self.min_upload_rate is None:
            return None
        return UploadBudget(self.min_upload_rate, self.upload_grace_s)


class UploadBudget:
    """The time that a server may still wait for the client of an upload.

    The budget is a token bucket: waiting consumes it, and each received byte refills it, up to `grace_s`. So
    a client may stall for `grace_s` at any point, and must otherwise keep the minimum rate. Time in which the
    server does not read is not counted, so a client is not rejected because the engine is slow.

    Args:
        rate: the number of bytes that refill one second of the budget.
        grace_s: the maximum and initial budget, in seconds.

    Attributes:
        left_s: the rest of the budget, in seconds; at 0 or below, the client is too slow.
        received: the number of bytes received so far.
    """

    def __init__(self, rate: float, grace_s: float) -> None:
        self.left_s = grace_s
        self.received = 0
        self._rate = rate
        self._grace_s = grace_s

    def add(self, nbytes: int) -> None:
        """Count received bytes."""
        self.received += nbytes
        self.left_s = min(self.left_s + nbytes / self._rate, self._grace_s)

    def wait(self, seconds: float) -> None:
        """Count time in which the server waited for the client."""
        # A longer time means that the loop was blocked or the process stopped, not that the server waited.
        self.left_s = max(self.left_s - seconds, -LAST_CHANCE_S)

    def error(self) -> SlowUploadError:
        """Return the error of an upload whose budget is empty."""
        return SlowUploadError(
            f"the upload was too slow for {self._grace_s:g} s, after {self.received} bytes"
        )
