"""The HTTP answers to errors of this library: problem details as in RFC 9457.

An overload and a lost engine become 503, with the time after which a client may try again. The texts of
errors (process ids, paths, messages from the engine) are logged, and not sent to clients.
"""

import errno
import logging
import math
import traceback
from http import HTTPStatus
from typing import Final

import msgspec

from aiotensor.errors import (
    AioTensorError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    RemoteError,
    TooLargeError,
    WouldBlockError,
)
from aiotensor.integrations.limits import OverdueError, SlowUploadError
from aiotensor.runtime.logs import logger_of

__all__ = ["ANSWERED_ERRORS", "MEDIA_TYPE", "Problem", "log_cut_off", "problem_of"]

logger = logger_of("integrations")

MEDIA_TYPE: Final = "application/problem+json"

# No descriptors, memory or threads are left, here or in the whole machine: later there may be some again.
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS, errno.EAGAIN))

# Errors of the engine's handler that mean that a message was lost on its way, or that the engine stops.
_LOSSES = frozenset(error.__name__ for error in (PeerLostError, DiscardedError, ClosedError))


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request was not answered.

    Attributes:
        status: the HTTP status.
        title: its phrase.
        detail: the reason in a sentence.
        reason: the same for programs: ``busy``, ``deadline``, ``exhausted``, ``engine_lost``,
            ``engine_failed``, ``refused``, ``slow_upload`` or ``too_large``.
        retry_after: after how many seconds to try again; None if that would not help.
    """

    status: int
    title: str
    detail: str
    reason: str
    retry_after: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer, but for its type."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    @property
    def body(self) -> bytes:
        """The answer, as JSON."""
        return msgspec.json.encode(self)


def problem_of(error: AioTensorError | OSError, retry_after_s: float) -> Problem | None:
    """Return the answer to an error, and log the error.

    Returns None for an error of the application: a misuse of this library, or an `OSError` that no call of
    this library raised.

    Args:
        error: the error of a handler.
        retry_after_s: the delay before a client tries again, in seconds.
    """
    problem = _problem_of(error, max(math.ceil(retry_after_s), 1))
    if problem is None:
        return None
    needs_operator = problem.reason in ("engine_failed", "refused", "exhausted")
    logger.log(
        logging.ERROR if needs_operator else logging.INFO,
        "a request is answered with %s, because of %s: %s",
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
    """Log an error that came after its response had begun, if it would be answered otherwise."""
    if _problem_of(error, 1) is not None:
        logger.warning(
            "a response was cut off after it had begun, because of %s: %s",
            type(error).__name__,
            error,
            extra={"event": "response_cut_off", "error": type(error).__name__, "reason": str(error)},
        )


ANSWERED_ERRORS: Final = (
    WouldBlockError,
    PeerLostError,
    RefusedError,
    DiscardedError,
    ClosedError,
    RemoteError,
    ProtocolError,
    TooLargeError,
)


def _problem_of(error: AioTensorError | OSError, later: int) -> Problem | None:
    match error:
        case SlowUploadError():
            detail = "the request body arrived too slowly"
            return _problem(HTTPStatus.REQUEST_TIMEOUT, detail, "slow_upload")
        case OverdueError():
            detail = "the server could not answer in time: try again later"
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, "deadline", later)
        case WouldBlockError():
            return _busy(later)
        case OSError() if error.errno in _EXHAUSTED and _is_of_library(error):
            return _problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the server has no descriptors, memory or threads left: try again later",
                "exhausted",
                later,
            )
        case RefusedError():
            return _refused()
        case RemoteError(type_name=RefusedError.__name__):
            return _refused()
        case RemoteError(type_name=WouldBlockError.__name__):
            return _busy(later)
        case PeerLostError() | DiscardedError() | ClosedError():
            return _engine_lost(later)
        case RemoteError() if error.type_name in _LOSSES:
            return _engine_lost(later)
        case RemoteError() | ProtocolError():
            return _problem(
                HTTPStatus.BAD_GATEWAY, "the engine could not answer this request", "engine_failed"
            )
        case TooLargeError():
            return _problem(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"this needs {error.requested} and can have {error.limit} at most",
                "too_large",
            )
        case _:
            return None


def _is_of_library(error: OSError) -> bool:
    """Return whether a call of this library raised the error."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    # The middleware and the dependencies of this package surround the application.
    return any(
        name.startswith("aiotensor.") and not name.startswith("aiotensor.integrations.") for name in modules
    )


def _busy(later: int) -> Problem:
    return _problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the server has as much to do as it can take: try again later",
        "busy",
        later,
    )


def _refused() -> Problem:
    return _problem(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the engine does not admit this server: see the server's log",
        "refused",
    )


def _engine_lost(later: int) -> Problem:
    return _problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the engine went away before it answered: try again later",
        "engine_lost",
        later,
    )


def _problem(status: HTTPStatus, detail: str, reason: str, later: int | None = None) -> Problem:
    return Problem(status.value, status.phrase, detail, reason, later)
