"""The budget of an upload, which is a pure computation, and the arguments of the limits."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.integrations.aiohttp import problem_middleware
from aiotensor.integrations.fastapi import TensorLifespan
from aiotensor.integrations.limits import RequestLimits, UploadBudget
from tests.integrations import totals
from tests.selection import COMPLETE

RATE, GRACE_S = 1000.0, 5.0


def budget() -> UploadBudget:
    made = RequestLimits(RATE, GRACE_S, None).upload_budget()
    assert made is not None
    return made


def test_a_fast_client_may_not_stall_longer_than_the_grace_period() -> None:
    upload = budget()
    upload.wait(GRACE_S / 2)
    assert upload.left_s == GRACE_S / 2
    upload.add(1 << 40)
    assert upload.left_s == GRACE_S
    assert upload.received == 1 << 40


@settings(max_examples=100 if COMPLETE else 30)
@given(st.lists(st.tuples(st.integers(0, 4000), st.floats(0.01, 10)), min_size=1, max_size=50))
def test_the_time_that_is_waited_for_a_client_is_bounded_by_what_it_sends(
    pieces: list[tuple[int, float]],
) -> None:
    upload = budget()
    waited = 0.0
    for nbytes, seconds in pieces:
        waited += min(seconds, max(upload.left_s, 0))
        upload.wait(seconds)
        if upload.left_s <= 0:
            break
        upload.add(nbytes)
    assert waited <= GRACE_S + upload.received / RATE + 1e-6


@pytest.mark.parametrize("name", ["min_upload_rate", "upload_grace_s", "deadline_s"])
def test_a_limit_that_is_not_positive_is_refused(name: str) -> None:
    for value in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"{name} must be positive"):
            TensorLifespan(totals.sender, **{name: value})
        with pytest.raises(ValueError, match=f"{name} must be positive"):
            problem_middleware(**{name: value})
