"""Every call that waits ends at its timeout, and when its object is closed, and releases its resources."""

import time
from contextlib import suppress

import pytest

from aiotensor import ClosedError
from tests.blocking.waiting import Place, in_thread, until
from tests.blocking.waits import WAITS
from verification.promptly import promptly

_LIMITED = [name for name, row in WAITS.items() if row.takes_timeout]


@pytest.mark.parametrize("name", _LIMITED)
def test_a_call_that_times_out_releases_its_resources(name: str, place: Place) -> None:
    row = WAITS[name]
    with row.far(place), row.near(place) as wait:
        before = wait.held()
        for timeout in (0, 0.05):
            begun = time.monotonic()
            with promptly(10), pytest.raises(TimeoutError):
                wait.call(timeout=timeout)
            assert time.monotonic() - begun >= timeout
            until(lambda: wait.held() == before)


@pytest.mark.parametrize(("name", "timeout"), [*((name, None) for name in WAITS), ("send", 0), ("serve", 0)])
def test_closing_ends_waiting_calls_of_other_threads(name: str, timeout: float | None, place: Place) -> None:
    row = WAITS[name]
    with row.far(place) as hear:
        with row.near(place) as wait:
            waiting = in_thread(wait.call)
            until(wait.is_waiting)
            with suppress(TimeoutError):
                wait.owner.close(timeout=timeout)
            if not row.takes_timeout:
                assert not waiting.result()
            else:
                assert isinstance(waiting.exception(), ClosedError)
        hear()
