"""Sums of the counters of several objects."""

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

from aiotensor.statistics.fields import counters
from aiotensor.types import Statistics, Waits

__all__ = ["Counts", "add_counts"]

# A key is the name of a counter with "", the type of an error, the bound of a wait ("" for the last one), or
# "total_s".
Counts: TypeAlias = dict[tuple[str, str], float]


def add_counts(counts: Counts, statistics: Statistics) -> None:
    """Add the counters of an object to a sum."""
    for name in counters(type(statistics)):
        value = getattr(statistics, name)
        parts: Iterable[tuple[str, float]] = (("", value),)
        if isinstance(value, Waits):
            parts = zip(_parts_of_waits(value.bounds_s), (*value.counts, value.total_s), strict=True)
        elif isinstance(value, dict):
            parts = value.items()
        for part, number in parts:
            key = (name, part)
            counts[key] = counts.get(key, 0) + number


@lru_cache(maxsize=8)  # all objects of a process count waits by the same bounds
def _parts_of_waits(bounds_s: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, bounds_s), "", "total_s")
