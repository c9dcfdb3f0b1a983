"""The metrics of all objects of this process, as observable instruments of OpenTelemetry."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from typing import get_args
from weakref import WeakKeyDictionary

from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

import aiotensor
from aiotensor.integrations.samples import counter_samples, gauge_samples, of_kind, wait_samples
from aiotensor.integrations.totals import MAX_ENDPOINTS, EndpointTotals, Totals
from aiotensor.statistics import registry
from aiotensor.statistics.fields import Family, families_of
from aiotensor.types import Statistics

__all__ = ["Metrics", "metrics_of"]

# The time limit in seconds for the answers of the event loops of other threads.
_TIMEOUT_S = 1.0


class Metrics:
    """The instruments of one meter.

    Args:
        meter: the meter.

    Attributes:
        is_enabled: whether the instruments report numbers; instruments cannot be removed from a meter.
    """

    def __init__(self, meter: Meter) -> None:
        self.is_enabled = False
        self._endpoints = EndpointTotals()
        self.renew()
        for kind in get_args(Statistics):
            for family in families_of(kind):
                self._add(meter, kind, family)

    def renew(self) -> None:
        """Forget the totals: a forked child has none of the objects of its parent."""
        # Reentrant: a signal handler that collects metrics may interrupt a collection in its thread.
        self._lock = threading.RLock()
        self._totals: Totals | None = None
        self._reported: set[str] = set()  # the instruments that have reported these totals

    def _add(self, meter: Meter, kind: type[Statistics], family: Family) -> None:
        name = family.name.replace("_", ".", 2)  # aiotensor.sender.messages_sent
        unit = "By" if name.endswith("_bytes") else ""
        if family.type == "gauge":
            make = (
                meter.create_observable_gauge
                if family.is_largest
                else meter.create_observable_up_down_counter
            )
            make(name, [self._callback(name, kind, partial(_gauges, family))], unit, family.text)
        elif family.type == "counter":
            numbers = self._callback(name, kind, partial(_counters, family))
            meter.create_observable_counter(name, [numbers], unit, family.text)
        else:  # no instrument observes the buckets of a histogram
            seconds = self._callback(name, kind, partial(_seconds, family))
            meter.create_observable_counter(name, [seconds], "s", f"{family.text} The total duration.")
            name = f"{name.removesuffix('_seconds')}_count"
            counts = self._callback(name, kind, partial(_waits, family))
            text = f"{family.text} The number of waits by their duration."
            meter.create_observable_counter(name, [counts], "", text)

    def _callback(
        self,
        name: str,
        kind: type[Statistics],
        observe: "Callable[[type[Statistics], Totals], Iterator[Observation]]",
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def report(options: CallbackOptions) -> Iterable[Observation]:
            return observe(kind, self._read(name)) if self.is_enabled else ()

        return report

    def _read(self, name: str) -> Totals:
        """Return the totals for an instrument, the same for all instruments of one collection."""
        with self._lock:
            totals = self._totals
            if totals is not None and name not in self._reported:
                self._reported.add(name)
                return totals
        # Without the lock: it would delay an event loop that collects metrics and is queried by this thread.
        totals = self._endpoints.take(registry.collect(_TIMEOUT_S), MAX_ENDPOINTS)
        with self._lock:
            self._totals, self._reported = totals, {name}
        return totals


def _gauges(family: Family, kind: type[Statistics], totals: Totals) -> Iterator[Observation]:
    present, _ = of_kind(kind, totals.present, totals.counts)
    for values, number in gauge_samples(family, present):
        if number < inf:  # SDKs ignore other numbers, or cannot add them up
            yield _observation(family, values, number)


def _counters(family: Family, kind: type[Statistics], totals: Totals) -> Iterator[Observation]:
    _, counted = of_kind(kind, totals.present, totals.counts)
    for values, number in counter_samples(family, counted):
        yield _observation(family, values, number)


def _seconds(family: Family, kind: type[Statistics], totals: Totals) -> Iterator[Observation]:
    _, counted = of_kind(kind, totals.present, totals.counts)
    for values, _, total_s in wait_samples(family, counted):
        yield _observation(family, values, total_s)


def _waits(family: Family, kind: type[Statistics], totals: Totals) -> Iterator[Observation]:
    _, counted = of_kind(kind, totals.present, totals.counts)
    for values, buckets, _ in wait_samples(family, counted):
        for bound, number in buckets:
            yield _observation(family, values, number, at_most_s=bound or "inf")


def _observation(family: Family, values: list[str], number: float, **more: str) -> Observation:
    return Observation(number, {**dict(zip(family.labels, values, strict=True)), **more})


# Creating the instruments of a provider twice would log a warning for each of them.
_by_provider: "WeakKeyDictionary[MeterProvider, Metrics]" = WeakKeyDictionary()


def metrics_of(provider: MeterProvider) -> Metrics:
    """Return the metrics of a provider; create the instruments for the first call."""
    metrics = _by_provider.get(provider)
    if metrics is None:
        metrics = _by_provider[provider] = Metrics(provider.get_meter("aiotensor", aiotensor.__version__))
    return metrics


def _renew() -> None:
    for metrics in _by_provider.values():
        metrics.renew()


os.register_at_fork(after_in_child=_renew)
