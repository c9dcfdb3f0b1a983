"""Counting what happened, for statistics: waits by how long they lasted, errors by what they were."""

from bisect import bisect_left
from types import TracebackType

from aiotensor import errors
from aiotensor.types import Waits

__all__ = ["ERROR_NAMES", "ErrorCounter", "WaitCounter"]

# From what a loop is busy with anyhow, to what nobody waits for any more.
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_OURS = frozenset(errors.__all__)

# Every name that errors are counted by: what is counted must not grow with the types that others make.
ERROR_NAMES = (*errors.__all__, "OSError", "other")


class WaitCounter:
    """Count the waits at one gate that ended, however they did."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a wait that lasted so long."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    def waits(self) -> Waits:
        """Return what was counted."""
        return Waits(_BOUNDS_S, tuple(self._counts), self._total_s)


class ErrorCounter:
    """Count the errors that calls end with, by their type; as the context of a call, or by `add`."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, error: BaseException) -> None:
        """Count an error; being cancelled is none. The error itself is not kept."""
        if isinstance(error, Exception):
            name = _name_of(type(error))
            self._counts[name] = self._counts.get(name, 0) + 1

    def counts(self) -> dict[str, int]:
        """Return what was counted."""
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
