"""Counters for statistics: plain numbers, waits by duration, and errors by type."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TypeVar

from aiotensor import errors
from aiotensor.statistics.fields import plain_counters
from aiotensor.types import Statistics, Waits

__all__ = ["ERROR_NAMES", "ErrorCounter", "WaitCounter", "new_counts", "snapshot"]

S = TypeVar("S", bound=Statistics)

# The bounds range from the usual delay of a busy event loop to the time at which most callers have given up.
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_OURS = frozenset(errors.__all__)

# The names under which errors are counted. Their number is limited, unlike that of types in an application.
ERROR_NAMES = (*errors.__all__, "OSError", "other")


def new_counts(kind: type[Statistics]) -> dict[str, int]:
    """Return a dictionary with a zero for each counter of a class of statistics that is a plain number.

    The object counts in this dictionary: ``counts["messages_sent"] += 1``. A name that is not declared raises
    `KeyError`.
    """
    return dict.fromkeys(plain_counters(kind), 0)


def snapshot(kind: type[S], counts: Mapping[str, object], **fields: object) -> S:
    """Return statistics with the counts from `new_counts` and the other fields, which take precedence."""
    make: Callable[..., S] = kind
    return make(**{**counts, **fields})


class WaitCounter:
    """Count the ended waits for one resource, with any outcome."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a wait of this duration."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    def waits(self) -> Waits:
        """Return the numbers of waits by duration."""
        return Waits(_BOUNDS_S, tuple(self._counts), self._total_s)


class ErrorCounter:
    """Count errors by their types, as a context manager around a call or with `add`."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, error: BaseException) -> None:
        """Count an error, but not a cancellation. Does not keep a reference to the error."""
        if isinstance(error, Exception):
            name = _name_of(type(error))
            self._counts[name] = self._counts.get(name, 0) + 1

    def counts(self) -> dict[str, int]:
        """Return the numbers of errors by the names of their types."""
        return dict(self._counts)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.add(error)


def _name_of(kind: type[Exception]) -> str:
    for base in kind.__mro__:
        if base is OSError or (base.__module__ == errors.__name__ and base.__name__ in _OURS):
            return base.__name__
    return "other"
