"""Responses to errors, limits on uploads, and the end of a sender, for all web frameworks.

Errors of this library become problem details (RFC 9457). If the server is overloaded or the engine is lost,
the response has the status 503, and the time after which a client may try again. The texts of errors are
logged and not sent to clients, because they contain process ids, paths and messages from the engine.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec

from aiotensor.errors import (
    AccessDeniedError,
    AioTensorError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    RemoteError,
    TooLargeError,
    UnavailableError,
    WouldBlockError,
)
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import TensorSender

logger = logger_of("integrations")


# Responses to errors

MEDIA_TYPE: Final = "application/problem+json"


class SlowUploadError(TimeoutError):
    """The client sent the body of a request too slowly."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The problem details of a failed request.

    Attributes:
        status: the HTTP status.
        title: the standard phrase for the status.
        detail: the reason in words, for people.
        reason: the reason as an identifier, for programs: ``busy``, ``engine_failed``, ``engine_lost``,
            ``engine_unavailable``, ``refused``, ``slow_upload`` or ``too_large``.
        retry_after: the seconds after which to try again; None if that would not help.
    """

    status: int
    title: str
    detail: str
    reason: str
    retry_after: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response, except its content type."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    @property
    def body(self) -> bytes:
        """The body of the response, as JSON."""
        return msgspec.json.encode(self)


_AGAIN: Final = HTTPStatus.SERVICE_UNAVAILABLE
_LOST: Final = (
    _AGAIN,
    "the connection to the engine was lost before it answered: try again later",
    "engine_lost",
)
_REFUSED: Final = (
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "the engine refused this server: see the server's log",
    "refused",
)
_FAILED: Final = (HTTPStatus.BAD_GATEWAY, "the engine could not answer this request", "engine_failed")

# The status, the detail and the reason of the response to each error. An error of a class is also answered if
# it was raised in the engine, which may itself have used another engine.
_OF_PEERS: Final = {
    UnavailableError: (_AGAIN, "the engine is not available: try again later", "engine_unavailable"),
    WouldBlockError: (_AGAIN, "the server is overloaded: try again later", "busy"),
    PeerLostError: _LOST,
    DiscardedError: _LOST,
    ClosedError: _LOST,
    RefusedError: _REFUSED,
    AccessDeniedError: _REFUSED,
}
_RAISED_THERE: Final = {kind.__name__: answer for kind, answer in _OF_PEERS.items()}

ANSWERED_ERRORS: Final = (*_OF_PEERS, RemoteError, ProtocolError, TooLargeError)


def _answer_to(error: AioTensorError | SlowUploadError) -> tuple[HTTPStatus, str, str] | None:
    """Return the status, the detail and the reason of the response; None for a misuse of this library."""
    match error:
        case SlowUploadError():
            return HTTPStatus.REQUEST_TIMEOUT, "the request body arrived too slowly", "slow_upload"
        case RemoteError() | ProtocolError():
            return _RAISED_THERE.get(getattr(error, "type_name", ""), _FAILED)
        case TooLargeError():
            detail = f"this request needs {error.requested} {error.unit}, but the limit is {error.limit}"
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, "too_large"
        case _:
            return next((_OF_PEERS[kind] for kind in type(error).__mro__ if kind in _OF_PEERS), None)


def problem_of(error: AioTensorError | SlowUploadError, retry_after_s: float) -> Problem | None:
    """Return the problem details for an error, and log the error; None for a misuse of this library.

    Args:
        error: the error that a handler raised.
        retry_after_s: the time in seconds after which a client may try again, for a status of 503.
    """
    answer = _answer_to(error)
    if answer is None:
        return None
    status, detail, reason = answer
    retry_after = max(math.ceil(retry_after_s), 1) if status is _AGAIN else None
    needs_operator = reason in ("engine_failed", "refused")
    logger.log(
        logging.ERROR if needs_operator else logging.INFO,
        "a request was answered with %s because of %s: %s",
        status.value,
        type(error).__name__,
        error,
        extra={
            "event": "request_refused",
            "status": status.value,
            "error": type(error).__name__,
            "reason": str(error),
        },
    )
    return Problem(status.value, status.phrase, detail, reason, retry_after)


# Limits on uploads

# The defaults: below the rate of the slowest networks over which videos are uploaded, and above their usual
# stalls.
MIN_UPLOAD_RATE: Final = 16 * 1024.0
UPLOAD_GRACE_S: Final = 10.0

# The time between two looks: short compared to the usual stalls, and long compared to the duration of a look.
_LOOK_EVERY_S: Final = 1.0
_LATE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """The limits on one upload.

    Attributes:
        min_upload_rate: the minimum rate at which a client must send the body, in bytes per second; None for
            no limit.
        upload_grace_s: the longest allowed stall of an upload, in seconds.

    Raises:
        ValueError: a limit is not positive.
    """

    min_upload_rate: float | None
    upload_grace_s: float

    def __post_init__(self) -> None:
        for name in ("min_upload_rate", "upload_grace_s"):
            value = getattr(self, name)
            if not (value is None and name == "min_upload_rate") and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")


class UploadWatch:
    """Look at an upload at intervals, and report a client that sends it too slowly.

    The client has a budget of time, a token bucket: time in which the server waits for the client consumes
    it, and each received byte refills it, up to `upload_grace_s`. So a client may stall that long at any
    point, and must otherwise keep the minimum rate. Time in which the server does not read is not counted, so
    a client is not rejected because the engine is slow.

    Args:
        limits: the limits on the upload.
        look: returns the number of bytes received so far, and whether the server waits for more of them; None
            when the upload is complete.
        on_slow: called once, when the budget is used up.

    Attributes:
        left_s: the rest of the budget, in seconds.
    """

    def __init__(
        self,
        limits: UploadLimits,
        look: Callable[[], tuple[int, bool] | None],
        on_slow: Callable[[SlowUploadError], None],
    ) -> None:
        self.left_s = limits.upload_grace_s
        self._received = 0
        self._limits = limits
        self._look = look
        self._on_slow = on_slow
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to look, in the running loop; without a minimum rate, this has no effect."""
        if self._limits.min_upload_rate is not None:
            loop = asyncio.get_running_loop()
            delay_s = min(self.left_s, _LOOK_EVERY_S)
            self._timer = loop.call_later(delay_s, self._look_now, loop.time(), delay_s)

    def end(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def count(self, received: int, waited_s: float) -> None:
        """Count the time that the server has waited for the client, and the bytes received until now."""
        refill_s = (received - self._received) / (self._limits.min_upload_rate or math.inf)
        self.left_s = min(self.left_s - waited_s + refill_s, self._limits.upload_grace_s)
        self._received = received

    def _look_now(self, since: float, delay_s: float) -> None:
        found = self._look()
        if found is None:
            return
        received, is_waiting = found
        waited_s = asyncio.get_running_loop().time() - since
        # If this call is late, the loop was blocked or the process stopped, and bytes may wait in the socket.
        is_counted = is_waiting and waited_s < delay_s + _LATE_S
        self.count(received, waited_s if is_counted else 0.0)
        if self.left_s > 0:
            self.begin()
        else:
            grace_s = self._limits.upload_grace_s
            self._on_slow(
                SlowUploadError(f"the upload was too slow for {grace_s:g} s, after {received} bytes")
            )


# The lifetime of a sender


@asynccontextmanager
async def serving(make: Callable[[], TensorSender], drain_s: float) -> AsyncIterator[TensorSender]:
    """Open a sender for as long as a server runs.

    At shutdown, the receiver has `drain_s` seconds to take the sent messages; the rest is discarded. A client
    needs nothing like it: its requests end with their handlers, and the server keeps other messages.

    Args:
        make: a function that creates the sender, called in the process and the event loop of the server.
        drain_s: the time limit for the receiver at shutdown, in seconds.
    """
    async with make() as sender:
        try:
            yield sender
        finally:
            # If the receiver is lost, the sender has logged the loss of its messages. If it denies access, no
            # message was announced to it. If the application has closed the sender, nothing is left to drain.
            with suppress(PeerLostError, RefusedError, AccessDeniedError, ClosedError):
                try:
                    async with asyncio.timeout(drain_s):
                        await sender.drain()
                except TimeoutError:
                    discarded = sender.discard_all()
                    logger.warning(
                        "%s messages were not taken within %g s of shutdown and were discarded",
                        discarded,
                        drain_s,
                        extra={
                            "event": "messages_discarded",
                            "messages_lost": discarded,
                            "waited_s": drain_s,
                        },
                    )
