"""The metrics for Prometheus and their samples, derived from the declared fields of statistics."""

from collections.abc import Iterator
from math import inf
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from aiotensor.integrations.totals import Totals
from aiotensor.statistics.counters import ERROR_NAMES
from aiotensor.statistics.fields import Family, families_of
from aiotensor.statistics.sums import Counts
from aiotensor.types import Statistics

__all__ = ["LARGEST", "families"]

_KINDS: tuple[type[Statistics], ...] = get_args(Statistics)

# The metrics of which the largest value is exported, not the sum.
LARGEST = frozenset(family.name for kind in _KINDS for family in families_of(kind) if family.is_largest)


def families(totals: Totals) -> Iterator[Metric]:
    """Return all metrics with a sample for each endpoint; without endpoints, only the metrics."""
    yield CounterMetricFamily(
        "aiotensor_scrape_timeouts", "Event loops that did not answer a scrape in time.", totals.timeouts
    )
    for kind in _KINDS:
        present: dict[str, list[Statistics]] = {}
        for endpoint, statistics in totals.present:
            if isinstance(statistics, kind):
                present.setdefault(endpoint, []).append(statistics)
        counted = {endpoint: counts for (of, endpoint), counts in totals.counts.items() if of is kind}
        for family in families_of(kind):
            if family.type == "gauge":
                yield _gauge(family, present)
            elif family.type == "counter":
                yield _counter(family, counted)
            else:
                yield _waits(family, counted)


def _gauge(family: Family, present: dict[str, list[Statistics]]) -> Metric:
    metric = GaugeMetricFamily(family.name, family.text, labels=family.labels)
    combine = max if family.is_largest else sum
    for field in family.fields:
        name, labels = field.name, list(field.labels.values())
        for endpoint, objects in present.items():
            metric.add_metric([endpoint, *labels], combine([_amount(getattr(one, name)) for one in objects]))
    return metric


def _amount(value: int | float | tuple[int, ...] | None) -> float:
    """Return the number of a gauge; None is an infinite limit."""
    if isinstance(value, tuple):
        return sum(value)
    return inf if value is None else value


def _counter(family: Family, counted: dict[str, Counts]) -> Metric:
    metric = CounterMetricFamily(family.name, family.text, labels=family.labels)
    for field in family.fields:
        labels = list(field.labels.values())
        series = [((field.name, ""), labels)]
        if field.is_by_type:
            # All types from the beginning: Prometheus sees no increase in the first sample of a series.
            series = [((field.name, error), [*labels, error]) for error in ERROR_NAMES]
        for endpoint, counts in counted.items():
            for key, others in series:
                metric.add_metric([endpoint, *others], counts.get(key, 0))
    return metric


def _waits(family: Family, counted: dict[str, Counts]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.text, labels=family.labels)
    for endpoint, counts in counted.items():
        for field in family.fields:
            buckets, below = [], 0.0
            for (name, bound), number in counts.items():  # in ascending order; the last bound is ""
                if name == field.name and bound != "total_s":
                    below += number
                    buckets.append((bound or "+Inf", below))
            labels = [endpoint, *field.labels.values()]
            metric.add_metric(labels, buckets, counts[field.name, "total_s"])
    return metric
