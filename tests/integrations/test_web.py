"""The HTTP answer to each error, and the limits on uploads, which are pure computations."""

import logging
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor import errors
from aiotensor.errors import AioTensorError
from aiotensor.integrations.aiohttp import problem_middleware
from aiotensor.integrations.fastapi import MessageLifespan
from aiotensor.integrations.web import ANSWERED_ERRORS, UploadLimits, UploadWatch, problem_of
from tests.integrations import totals
from tests.selection import COMPLETE

WORDS = "pid 77 at /run/secret"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (errors.WouldBlockError(WORDS), 503, "busy"),
        (errors.UnavailableError(WORDS), 503, "engine_unavailable"),
        (errors.PeerLostError(WORDS, pid=77), 503, "engine_lost"),
        (errors.DiscardedError(WORDS), 503, "engine_lost"),
        (errors.ClosedError(WORDS), 503, "engine_lost"),
        (errors.RemoteError(WORDS, type_name="PeerLostError"), 503, "engine_lost"),
        (errors.RemoteError(WORDS, type_name="ValueError"), 502, "engine_failed"),
        (errors.ProtocolError(WORDS), 502, "engine_failed"),
        (errors.RefusedError(WORDS, pid=77), 500, "refused"),
        (errors.AccessDeniedError(WORDS), 500, "refused"),
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


def test_the_answer_states_the_exceeded_limit_with_its_unit_and_a_time_of_whole_seconds() -> None:
    problem = problem_of(errors.TooLargeError(WORDS, limit=5, requested=7, unit="tensors"), 1)
    assert problem is not None
    assert msgspec.json.decode(problem.body)["detail"] == "this request needs 7 tensors, but the limit is 5"
    problem = problem_of(errors.WouldBlockError("busy"), 0.001)
    assert problem is not None
    assert problem.retry_after == 1


def test_misuses_of_the_library_have_no_answer() -> None:
    answered = set(ANSWERED_ERRORS)
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind not in answered:
            assert problem_of(kind("a bug"), 1) is None, name
    assert len(answered) == len(ANSWERED_ERRORS)


# The limits on uploads

RATE, GRACE_S = 1000.0, 5.0


def watch() -> UploadWatch:
    return UploadWatch(UploadLimits(RATE, GRACE_S), lambda: None, lambda error: None)


def test_a_fast_client_may_not_stall_longer_than_the_grace_period() -> None:
    upload = watch()
    upload.count(0, GRACE_S / 2)
    assert upload.left_s == GRACE_S / 2
    upload.count(1 << 40, 0.0)
    assert upload.left_s == GRACE_S


@settings(max_examples=100 if COMPLETE else 30)
@given(st.lists(st.tuples(st.integers(0, 4000), st.floats(0.01, 10)), min_size=1, max_size=50))
def test_the_time_that_is_waited_for_a_client_is_bounded_by_what_it_sends(
    pieces: list[tuple[int, float]],
) -> None:
    upload = watch()
    received, waited = 0, 0.0
    for nbytes, seconds in pieces:
        if upload.left_s <= 0:
            break
        counted = min(seconds, upload.left_s)  # the next look is never later
        received, waited = received + nbytes, waited + counted
        upload.count(received, counted)
    assert waited <= GRACE_S + received / RATE + 1e-6


@pytest.mark.parametrize("name", ["min_upload_rate", "upload_grace_s"])
def test_a_limit_that_is_not_positive_is_refused(name: str) -> None:
    for value in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"{name} must be positive"):
            MessageLifespan(totals.client, **{name: value})
        with pytest.raises(ValueError, match=f"{name} must be positive"):
            problem_middleware(**{name: value})
