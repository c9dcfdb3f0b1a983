"""The samples of the metrics of statistics, for all systems that export them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TypeAlias

from aiotensor.statistics.counters import ERROR_NAMES
from aiotensor.statistics.fields import Family
from aiotensor.statistics.registry import Counts, Group
from aiotensor.types import Statistics

__all__ = ["counter_samples", "gauge_samples", "of_kind", "wait_samples"]

_Present: TypeAlias = Mapping[str, Sequence[Statistics]]
_Counted: TypeAlias = Mapping[str, Counts]


def of_kind(
    kind: type[Statistics], objects: Iterable[tuple[str, Statistics]], counts: Mapping[Group, Counts]
) -> tuple[_Present, _Counted]:
    """Return the statistics and the counts of one kind of objects, by their endpoints."""
    present: dict[str, list[Statistics]] = {}
    for endpoint, statistics in objects:
        if isinstance(statistics, kind):
            present.setdefault(endpoint, []).append(statistics)
    return present, {endpoint: found for (of, endpoint), found in counts.items() if of is kind}


def gauge_samples(family: Family, present: _Present) -> Iterator[tuple[list[str], float]]:
    """Iterate over the samples of a gauge: the values of its labels, and the number."""
    combine = max if family.is_largest else sum
    for field in family.fields:
        name, labels = field.name, list(field.labels.values())
        for endpoint, objects in present.items():
            yield [endpoint, *labels], combine([_amount(getattr(one, name)) for one in objects])


def _amount(value: int | float | tuple[int, ...] | None) -> float:
    """Return the value of a gauge; a limit of None is exported as infinity."""
    if isinstance(value, tuple):
        return sum(value)
    return inf if value is None else value


def counter_samples(family: Family, counted: _Counted) -> Iterator[tuple[list[str], float]]:
    """Iterate over the samples of a counter: the values of its labels, and the number."""
    for field in family.fields:
        labels = list(field.labels.values())
        series = [((field.name, ""), labels)]
        if field.is_by_type:
            # Samples exist for all types from the beginning: Prometheus sees no increase in the first one.
            series = [((field.name, error), [*labels, error]) for error in ERROR_NAMES]
        for endpoint, counts in counted.items():
            for key, others in series:
                yield [endpoint, *others], counts.get(key, 0)


def wait_samples(
    family: Family, counted: _Counted
) -> Iterator[tuple[list[str], list[tuple[str, float]], float]]:
    """Iterate over the samples of a histogram of waits.

    Returns:
        the values of the labels; the bound of each bucket, in ascending order and "" for the last one, with
        the number of waits in it; and the total duration in seconds.
    """
    for endpoint, counts in counted.items():
        for field in family.fields:
            buckets = [
                (bound, number)
                for (name, bound), number in counts.items()
                if name == field.name and bound != "total_s"
            ]
            yield [endpoint, *field.labels.values()], buckets, counts[field.name, "total_s"]
