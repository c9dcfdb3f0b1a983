"""Counts of waits and errors, and the metrics that derive from the declared fields of statistics."""

import asyncio
import itertools
import weakref
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor import errors
from aiotensor.statistics.counters import ERROR_NAMES, ErrorCounter, WaitCounter, exported
from aiotensor.types import Statistics


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(WaitCounter().waits().bounds_s)), max_size=50))
def test_each_wait_is_counted_by_the_first_bound_that_it_did_not_exceed(lasted: list[float]) -> None:
    tally = WaitCounter()
    for seconds in lasted:
        tally.add(seconds)
    waits = tally.waits()

    assert len(waits.counts) == len(waits.bounds_s) + 1
    for bound, below in zip(waits.bounds_s, itertools.accumulate(waits.counts), strict=False):
        assert below == sum(seconds <= bound for seconds in lasted)
    assert sum(waits.counts) == len(lasted)
    assert waits.total_s == pytest.approx(sum(lasted))


class _Theirs(errors.PeerLostError):
    """An error derived from one of the library."""


class _Namesake(Exception):  # noqa: N818 - it is called like one of ours
    """An error of another library."""


_Namesake.__name__ = "ClosedError"

COUNTED = {
    **{getattr(errors, name)("an error"): name for name in errors.__all__},
    _Theirs("lost"): "PeerLostError",
    OSError(12, "no memory"): "OSError",
    TimeoutError(): "OSError",
    ValueError("negative"): "other",
    TypeError("no tensor"): "other",
    _Namesake(): "other",
}


def test_errors_are_counted_under_a_fixed_set_of_names() -> None:
    for error, name in COUNTED.items():
        tally = ErrorCounter()
        with pytest.raises(type(error)), tally:
            raise error
        tally.add(error)
        assert tally.counts() == {name: 2}
        assert name in ERROR_NAMES
        error.__traceback__ = None
    tally = ErrorCounter()
    with pytest.raises(asyncio.CancelledError), tally:
        raise asyncio.CancelledError
    assert tally.counts() == {}


def test_an_error_that_was_counted_is_not_kept() -> None:
    tally = ErrorCounter()
    error = _Theirs("lost")
    gone = weakref.ref(error)
    tally.add(error)
    del error

    assert gone() is None


# Fields

KINDS: tuple[type[Statistics], ...] = get_args(Statistics)


def test_all_fields_but_holders_and_limits_for_each_client_are_exported() -> None:
    metrics = {field.name for kind in KINDS for field in exported(kind)}
    declared = {name for kind in KINDS for name in kind.__struct_fields__}
    assert declared - metrics == {
        "address",
        "engines",
        "holders",
        "lags",
        "max_waiting",
    }
