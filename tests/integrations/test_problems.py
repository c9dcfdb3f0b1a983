"""The HTTP answer to each error, and the details that are only logged."""

import errno
import logging
import os

import msgspec
import pytest

from aiotensor import errors
from aiotensor.errors import AioTensorError
from aiotensor.integrations.problems import ANSWERED_ERRORS, problem_of

WORDS = "pid 77 at /run/secret"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (errors.WouldBlockError(WORDS), 503, "busy"),
        (errors.UnavailableError(WORDS), 503, "engine_unavailable"),
        (errors.RemoteError(WORDS, type_name="UnavailableError"), 503, "engine_unavailable"),
        (errors.PeerLostError(WORDS, pid=77), 503, "engine_lost"),
        (errors.DiscardedError(WORDS), 503, "engine_lost"),
        (errors.ClosedError(WORDS), 503, "engine_lost"),
        (errors.RemoteError(WORDS, type_name="PeerLostError"), 503, "engine_lost"),
        (errors.RemoteError(WORDS, type_name="ValueError"), 502, "engine_failed"),
        (errors.ProtocolError(WORDS), 502, "engine_failed"),
        (errors.RefusedError(WORDS, pid=77), 500, "refused"),
        (errors.AccessDeniedError(WORDS), 500, "refused"),
        (errors.RemoteError(WORDS, type_name="AccessDeniedError"), 500, "refused"),
        (errors.RemoteError(WORDS, type_name="WouldBlockError"), 503, "busy"),
        (errors.TooLargeError(WORDS, limit=5, requested=7), 413, "too_large"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_error_has_a_response_and_its_text_is_only_logged(
    error: AioTensorError, status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiotensor.integrations")
    problem = problem_of(error, 2.2)
    assert problem is not None
    assert isinstance(error, ANSWERED_ERRORS)

    told = msgspec.json.decode(problem.body)
    assert (problem.status, told["status"], told["reason"]) == (status, status, reason)
    assert "secret" not in problem.body.decode()
    assert problem.headers == ({"Retry-After": "3"} if status == 503 else {})
    assert told.get("retry_after") == (3 if status == 503 else None)
    [record] = caplog.records
    assert WORDS in record.getMessage()
    assert (record.levelno >= logging.ERROR) == (reason in ("engine_failed", "refused"))


def test_a_request_that_is_too_large_is_answered_with_the_limit_and_its_unit() -> None:
    problem = problem_of(errors.TooLargeError(WORDS, limit=5, requested=7, unit="tensors"), 1)
    assert problem is not None
    assert msgspec.json.decode(problem.body)["detail"] == "this request needs 7 tensors, but the limit is 5"


def test_retry_after_is_at_least_one_second() -> None:
    problem = problem_of(errors.WouldBlockError("busy"), 0.001)
    assert problem is not None
    assert problem.retry_after == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_an_os_error_of_the_application_has_no_problem_response(number: int) -> None:
    assert problem_of(OSError(number, os.strerror(number)), 1) is None


def test_errors_of_the_servers_own_code_have_no_answer() -> None:
    answered = set(ANSWERED_ERRORS)
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind not in answered:
            assert problem_of(kind("a bug"), 1) is None, name
    assert len(answered) == len(ANSWERED_ERRORS)
