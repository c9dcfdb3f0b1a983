"""Export the statistics of all objects of this process to Prometheus. Requires prometheus_client.

    REGISTRY.register(AioTensorCollector())

docs/operation.md lists the metrics. The statistics of all objects at one endpoint are added up, so the number
of series depends on the number of endpoints, and not on the number of objects.
"""

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import inf
from types import TracebackType
from typing import Any, Self, TypeAlias, get_args

import anyio

from aiotensor.integrations import not_installed

try:
    from prometheus_client import values
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Sample
except ModuleNotFoundError as error:
    raise not_installed(error, __name__) from None

from aiotensor.errors import UsageError
from aiotensor.runtime.arguments import seconds
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.worker import in_thread
from aiotensor.statistics import registry
from aiotensor.statistics.counters import ERROR_NAMES, Field, exported
from aiotensor.statistics.registry import Counts, Snapshot
from aiotensor.types import Statistics

__all__ = ["AioTensorCollector", "MultiprocessPublisher"]

logger = logger_of("integrations")


class AioTensorCollector(Collector):
    """Export the statistics of all objects of this process to Prometheus.

    Register it once: ``REGISTRY.register(AioTensorCollector())``. It finds all open senders, receivers,
    publishers, subscribers, clients, servers and pipes, including those of `aiotensor.blocking`. Counters
    include closed objects, even if these were closed before the collector was created. A process remembers
    the 100 endpoints that it closed last; the series of an older one end, and begin at 0 if it opens again.

    A scrape works in any thread, and several threads may scrape at once. A scrape reads the objects of its
    thread immediately, queries the event loops of other threads, which answer in their next iteration, and
    blocks until they have answered or the time limit is reached. So scrape in a separate thread, or at least
    not in an event loop that must not wait for another one. If a loop does not answer in time, the previous
    statistics of its objects are exported again. Without scrapes, the collector does nothing.

    Args:
        timeout_s: the time limit in seconds for the answers of other event loops, for all of them together.

    Raises:
        ValueError: the timeout is negative or too long.
    """

    def __init__(self, *, timeout_s: float = 1.0) -> None:
        self._timeout_s = seconds("timeout_s", timeout_s)

    def describe(self) -> Iterable[Metric]:
        """Return all metrics without samples, and without reading any object."""
        return list(_metrics(Snapshot([], {}, 0)))

    def collect(self) -> Iterable[Metric]:
        """Return all metrics with their samples.

        Can be called from any thread. Blocks it for at most `timeout_s` seconds.
        """
        return list(_metrics(registry.collect(self._timeout_s)))


# The metrics and their samples, derived from the declared fields of statistics

_KINDS: tuple[type[Statistics], ...] = get_args(Statistics)

# The metrics that export the largest value of all objects, instead of the sum.
_LARGEST = frozenset(field.metric for kind in _KINDS for field in exported(kind) if field.is_largest)


def _metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Return all metrics with a sample for each endpoint; without endpoints, only the metrics."""
    yield CounterMetricFamily(
        "aiotensor_scrape_timeouts", "Event loops that did not answer a scrape in time.", snapshot.timeouts
    )
    for kind in _KINDS:
        present: dict[str, list[Statistics]] = {}
        for endpoint, statistics in snapshot.present:
            if isinstance(statistics, kind):
                present.setdefault(endpoint, []).append(statistics)
        counted = {endpoint: found for (of, endpoint), found in snapshot.counts.items() if of is kind}
        histograms: dict[str, list[Field]] = {}
        for field in exported(kind):
            if field.type == "gauge":
                yield _gauge(field, present)
            elif field.type == "counter":
                yield _counter(field, counted)
            else:
                histograms.setdefault(field.metric, []).append(field)
        for fields in histograms.values():
            yield _histogram(fields, counted)


def _gauge(field: Field, present: dict[str, list[Statistics]]) -> Metric:
    metric = GaugeMetricFamily(field.metric, field.text, labels=["endpoint"])
    combine = max if field.is_largest else sum
    for endpoint, objects in present.items():
        amounts = [getattr(one, field.name) for one in objects]
        # A limit of None is exported as infinity.
        number = combine([inf if amount is None else amount for amount in amounts])
        metric.add_metric([endpoint], number)
    return metric


def _counter(field: Field, counted: dict[str, Counts]) -> Metric:
    metric = CounterMetricFamily(field.metric, field.text, labels=["endpoint", *["type"] * field.is_by_type])
    for endpoint, counts in counted.items():
        # Samples exist for all types from the beginning: Prometheus sees no increase in the first one.
        for part in ERROR_NAMES if field.is_by_type else ("",):
            labels = [endpoint, part] if part else [endpoint]
            metric.add_metric(labels, counts.get((field.name, part), 0))
    return metric


def _histogram(fields: list[Field], counted: dict[str, Counts]) -> Metric:
    text = " ".join(field.text for field in fields)
    names = ["endpoint", "for"] if fields[0].waits_for else ["endpoint"]
    metric = HistogramMetricFamily(fields[0].metric, text, labels=names)
    for endpoint, counts in counted.items():
        for field in fields:
            waits = {bound: number for (name, bound), number in counts.items() if name == field.name}
            total_s = waits.pop("total_us") / 1e6
            bounds = [bound or "+Inf" for bound in waits]
            buckets = list(zip(bounds, accumulate(waits.values()), strict=True))
            labels = [endpoint, field.waits_for] if field.waits_for else [endpoint]
            metric.add_metric(labels, buckets, total_s)
    return metric


# Several processes


class _Number:
    """A number in the files of prometheus_client."""

    def __init__(self, metric: Metric, sample: Sample) -> None:
        make: Any = values.ValueClass  # which has no type annotations
        self._value = make(
            metric.type,
            metric.name,
            sample.name,
            tuple(sample.labels),
            tuple(sample.labels.values()),
            metric.documentation,
            multiprocess_mode="livemax" if metric.name in _LARGEST else "livesum",
        )
        self._is_gauge = metric.type == "gauge"
        self._written = 0.0

    def write(self, amount: float) -> None:
        if self._is_gauge:
            self._value.set(amount)
        elif amount > self._written:  # else its endpoint was forgotten: the file keeps what it has
            # Incremented, not set: an earlier process with the same id may have written to the file.
            self._value.inc(amount - self._written)
        self._written = amount


_Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]

# All publishers of a process write to the same files, and continue from each other's numbers.
_numbers: dict[_Series, _Number] = {}
_publishing = threading.Lock()


class MultiprocessPublisher:
    """Publish the metrics of `AioTensorCollector` in an application with several processes.

    If ``PROMETHEUS_MULTIPROC_DIR`` is set, prometheus_client reads the numbers of all processes from files in
    that folder, and does not call the collectors of other processes. The publisher writes these files: open
    it with ``async with`` in each worker, around its senders and receivers, so that it closes after them. It
    publishes when it opens, every `interval_s` seconds, and when it closes. A thread writes the files.

    If a worker is killed, its counters keep the values that it published last. Its gauges are removed when
    the parent process calls ``prometheus_client.multiprocess.mark_process_dead(pid)``.

    Args:
        interval_s: the seconds between two updates of the files.
        timeout_s: the time limit in seconds for the answers of other event loops of this process, for all of
            them together.

    Raises:
        UsageError: the multiprocess mode of prometheus_client is not enabled.
        ValueError: the interval is not positive, or the timeout is negative or too long.
    """

    def __init__(self, *, interval_s: float = 5.0, timeout_s: float = 1.0) -> None:
        if not 0 < interval_s < inf:
            raise ValueError(f"interval_s must be positive, got {interval_s}")
        if not getattr(values.ValueClass, "_multiprocess", False):
            raise UsageError(
                "prometheus_client stores its metrics only in this process: set PROMETHEUS_MULTIPROC_DIR to "
                "a folder before anything imports it, or register an AioTensorCollector instead"
            )
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Publish for the first time, and begin to publish at intervals.

        Raises:
            UsageError: it was opened before.
            OSError: the folder cannot be written to, or the machine has no threads left.
        """
        if self._task is not None:
            raise UsageError("this MultiprocessPublisher was already opened: create a new one")
        await self._publish()
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._publish()
            if not self._task.cancelled():
                self._task.result()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._publish()
            except OSError as error:
                logger.error(
                    "publishing metrics for prometheus_client failed and will be retried: %s",
                    error,
                    extra={"event": "publishing_failed", "reason": str(error)},
                )

    async def _publish(self) -> None:
        # With a separate limiter, no other call waits for this thread, which may be busy for long: a file may
        # grow, and a loop may not answer.
        await in_thread(self._publish_now, limiter=anyio.CapacityLimiter(1))

    def _publish_now(self) -> None:
        with _publishing:
            _write(_metrics(registry.collect(self._timeout_s)))


def _write(metrics: Iterable[Metric]) -> None:
    """Write the samples of metrics to the files of prometheus_client."""
    gone = set(_numbers)
    for metric in metrics:
        # The files contain the number in each bucket, unlike the samples, which are cumulative.
        below: dict[tuple[str, ...], float] = {}
        for sample in metric.samples:
            amount = sample.value
            if sample.name.endswith("_bucket"):
                series = tuple(value for label, value in sample.labels.items() if label != "le")
                below[series], amount = amount, amount - below.get(series, 0.0)
            elif metric.type == "histogram" and sample.name.endswith("_count"):
                continue  # prometheus_client adds up the buckets
            key = (sample.name, tuple(sample.labels.items()))
            gone.discard(key)
            if key not in _numbers:
                _numbers[key] = _Number(metric, sample)
            _numbers[key].write(amount)
    for key in gone:
        _numbers[key].write(0.0)


def _renew() -> None:
    """Forget the numbers of the parent: a forked child has its own files."""
    global _publishing
    _numbers.clear()
    _publishing = threading.Lock()


os.register_at_fork(after_in_child=_renew)
