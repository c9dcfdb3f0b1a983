"""HTTP responses for errors of this library, as problem details (RFC 9457).

If the server is overloaded or the engine is lost, the response has the status 503, and the time after which a
client may try again. The texts of errors are logged and not sent to clients, because they contain process
ids, paths and messages from the engine.
"""

import logging
import math
import traceback
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
    is_shortage,
)
from aiotensor.integrations.limits import OverdueError, SlowUploadError
from aiotensor.runtime.logs import logger_of

__all__ = ["ANSWERED_ERRORS", "MEDIA_TYPE", "Problem", "log_cut_off", "problem_of"]

logger = logger_of("integrations")

MEDIA_TYPE: Final = "application/problem+json"


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The problem details of a failed request.

    Attributes:
        status: the HTTP status.
        title: the standard phrase for the status.
        detail: the reason in words, for people.
        reason: the reason as an identifier, for programs: ``busy``, ``deadline``,
            ``engine_failed``, ``engine_lost``, ``engine_unavailable``, ``exhausted``, ``refused``,
            ``slow_upload`` or ``too_large``.
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


def problem_of(error: AioTensorError | OSError, retry_after_s: float) -> Problem | None:
    """Return the problem details for an error, and log the error.

    Returns None for an error of the application: a misuse of this library, or an `OSError` that no call of
    this library raised.

    Args:
        error: the error that a handler raised.
        retry_after_s: the time in seconds after which a client may try again, for a status of 503.
    """
    answer = _answer_to(error)
    if answer is None:
        return None
    status, detail, reason = answer
    is_temporary = status is HTTPStatus.SERVICE_UNAVAILABLE
    retry_after = max(math.ceil(retry_after_s), 1) if is_temporary else None
    problem = Problem(status.value, status.phrase, detail, reason, retry_after)
    needs_operator = reason in ("engine_failed", "refused", "exhausted")
    logger.log(
        logging.ERROR if needs_operator else logging.INFO,
        "a request was answered with %s because of %s: %s",
        problem.status,
        type(error).__name__,
        error,
        extra={
            "event": "request_refused",
            "status": problem.status,
            "error": type(error).__name__,
            "reason": str(error),
        },
    )
    return problem


def log_cut_off(error: AioTensorError | OSError) -> None:
    """Log an error that was raised after the response had begun, if it would otherwise be answered."""
    if _answer_to(error) is not None:
        logger.warning(
            "a response was cut off after it had begun because of %s: %s",
            type(error).__name__,
            error,
            extra={"event": "response_cut_off", "error": type(error).__name__, "reason": str(error)},
        )


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
_EXHAUSTED: Final = (
    _AGAIN,
    "the server has no descriptors, memory or threads left: try again later",
    "exhausted",
)

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


def _answer_to(error: AioTensorError | OSError) -> tuple[HTTPStatus, str, str] | None:
    """Return the status, the detail and the reason of the response; None for an error of the application."""
    match error:
        case SlowUploadError():
            return HTTPStatus.REQUEST_TIMEOUT, "the request body arrived too slowly", "slow_upload"
        case OverdueError():
            return _AGAIN, "the server could not answer in time: try again later", "deadline"
        case OSError():
            return _EXHAUSTED if is_shortage(error) and _is_of_library(error) else None
        case RemoteError() | ProtocolError():
            return _RAISED_THERE.get(getattr(error, "type_name", ""), _FAILED)
        case TooLargeError():
            detail = f"this request needs {error.requested} {error.unit}, but the limit is {error.limit}"
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, "too_large"
        case _:
            return next((_OF_PEERS[kind] for kind in type(error).__mro__ if kind in _OF_PEERS), None)


def _is_of_library(error: OSError) -> bool:
    """Return whether a call of this library raised the error."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    # The integrations do not count: their middleware and dependencies also call the application's code.
    return any(
        name.startswith("aiotensor.") and not name.startswith("aiotensor.integrations.") for name in modules
    )
