"""What senders, receivers, clients and servers hold and have done, for Prometheus; needs prometheus_client.

    REGISTRY.register(AioTensorCollector())

Each object of this process is asked when somebody scrapes, and not before. Names and meanings are in
docs/metrics.md. What is open at one endpoint is added up, so there are as many series as endpoints, however
many objects come and go.
"""

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator
from math import inf
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import anyio
from prometheus_client import values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aiotensor import opened
from aiotensor.errors import UsageError
from aiotensor.integrations.families import ERRORS, LARGEST, TABLE
from aiotensor.logs import logger_of
from aiotensor.opened import Counts, Place, Report, Statistics
from aiotensor.tally import ERROR_NAMES
from aiotensor.types import SenderStatistics
from aiotensor.worker import in_thread

__all__ = ["AioTensorCollector", "MultiprocessPublisher"]

logger = logger_of("integrations")


class AioTensorCollector(Collector):
    """Tell Prometheus of every sender, receiver, client and server of this process.

    Register it once: ``REGISTRY.register(AioTensorCollector())``. Whatever is open is found, also what
    `aiotensor.blocking` opened, and what was closed stays in the counters, also what was closed before this
    was made. Those of the 256 endpoints that were closed last, if a process has more.

    A scrape may come in any thread. What lives in that thread is asked at once; other loops are asked to
    answer in their next turn, for which the thread waits: scrape in a thread of its own, or at least not in
    an event loop that must not wait for another one. Of a loop that does not answer in time, what was known
    before is told again. Nobody is asked, and nothing wakes up, when nobody scrapes.

    Args:
        timeout_s: for how many seconds a scrape waits for other loops, for all of them together.
    """

    def __init__(self, *, timeout_s: float = 1.0) -> None:
        self._timeout_s = _timeout(timeout_s)
        self._lock = threading.Lock()
        self._timeouts = 0

    def __repr__(self) -> str:
        return f"<AioTensorCollector timeout_s={self._timeout_s:g}, {self._timeouts} timeouts>"

    def describe(self) -> Iterable[Metric]:
        """Return all families without their samples; asks nobody."""
        return list(_families(Report([], {}, {}, 0, 0), None))

    def collect(self) -> Iterable[Metric]:
        """Return what is held and what was done, from any thread."""
        report = opened.look(self._timeout_s)
        with self._lock:
            self._timeouts += report.unanswered
            timeouts = self._timeouts
        return list(_families(report, timeouts))


def _timeout(seconds: float) -> float:
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s is seconds, at least 0, got {seconds}")
    return seconds


def _families(report: Report, timeouts: int | None) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "aiotensor_scrape_timeouts", "Event loops that did not answer a scrape in time.", timeouts
    )
    for kind, gauges, counters in TABLE:
        present: dict[str, list[Statistics]] = {}
        for endpoint, statistics in report.present:
            if isinstance(statistics, kind):
                present.setdefault(endpoint, []).append(statistics)
        counted = {endpoint: counts for (of, endpoint), counts in report.counts.items() if of is kind}
        for gauge in gauges:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=["endpoint"])
            for endpoint, those in present.items():
                amounts = [_amount(getattr(one, gauge.field)) for one in those]
                family.add_metric([endpoint], max(amounts) if gauge.is_largest else sum(amounts))
            yield family
        for counter in counters:
            total = CounterMetricFamily(counter.name, counter.help, labels=["endpoint"])
            for endpoint, counts in counted.items():
                total.add_metric([endpoint], counts[counter.field, ""])
            yield total
        if kind is SenderStatistics:
            yield _waits(counted)
        for of, name, text in ERRORS:
            if of is kind:
                yield _errors(name, text, counted)


def _amount(value: int | float | tuple[int, ...] | None) -> float:
    """Return a gauge's number: a limit that there is not is infinite."""
    if isinstance(value, tuple):
        return sum(value)
    return inf if value is None else value


def _waits(counted: dict[str, Counts]) -> Metric:
    family = HistogramMetricFamily(
        "aiotensor_sender_wait_seconds",
        "How long waits for a permit and for memory lasted that have ended.",
        labels=["endpoint", "for"],
    )
    for endpoint, counts in counted.items():
        for field, what in (("permit_waits", "permit"), ("memory_waits", "memory")):
            buckets, below = [], 0.0
            for (name, bound), number in counts.items():  # the bounds grow, and the last has no name
                if name == field and bound != "total_s":
                    below += number
                    buckets.append((bound or "+Inf", below))
            family.add_metric([endpoint, what], buckets, counts[field, "total_s"])
    return family


def _errors(name: str, text: str, counted: dict[str, Counts]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["endpoint", "type"])
    for endpoint, counts in counted.items():
        # All that can be: the first error of a type would else be no increase.
        for kind in ERROR_NAMES:
            family.add_metric([endpoint, kind], counts.get(("errors", kind), 0))
    return family


# Several processes


class _Value(Protocol):
    """A number in a file of prometheus_client."""

    def inc(self, amount: float) -> None: ...

    def set(self, value: float) -> None: ...


class _Published(NamedTuple):
    """A number that was published, and what it was last."""

    value: _Value
    amount: float
    is_gauge: bool


_Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]

# Of this process: who publishes after another one adds to what that has published.
_published: dict[_Key, _Published] = {}

# Nothing in the files of prometheus_client can be removed, so the names there are to be few.
_MAX_NAMES = 256
_OTHER = "other"


class _Totals:
    """What was counted since the process began, under as many names as are published."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._last: dict[Place, tuple[Counts, int]] = {}  # what was told, and the number that it began with
        self._counts: dict[Place, Counts] = {}
        self.timeouts = 0

    def take(self, report: Report) -> Report:
        """Add what was counted since the last time, and return the report under the names."""
        last = {place: (counts, report.begun[place]) for place, counts in report.counts.items()}
        for (kind, endpoint), (counts, begun) in last.items():
            told, begun_then = self._last.get((kind, endpoint), ({}, begun))
            if begun > begun_then:
                told = {}  # it was forgotten, and has begun anew
            total = self._counts.setdefault((kind, self._name(endpoint)), {})
            for key, number in counts.items():
                total[key] = total.get(key, 0) + number - told.get(key, 0)
        self._last = last
        self.timeouts += report.unanswered
        present = [(self._name(endpoint), statistics) for endpoint, statistics in report.present]
        return report._replace(present=present, counts=self._counts)

    def _name(self, endpoint: str) -> str:
        if endpoint not in self._names and len(self._names) == _MAX_NAMES:
            return _OTHER
        self._names.add(endpoint)
        return endpoint


_totals = _Totals()
_publishing = threading.Lock()


class MultiprocessPublisher:
    """Publish what `AioTensorCollector` tells where several processes serve one application.

    With ``PROMETHEUS_MULTIPROC_DIR`` set, prometheus_client gathers the numbers of all processes from files
    in that folder, and asks no collector of another process. This writes them there: open it with
    ``async with`` in each worker, around its senders and receivers, so that it closes after them. It wakes up
    by itself, every `interval_s` seconds, which nothing else of aiotensor does. The work is done in a thread.

    Nothing can be removed from the files, so the first 256 endpoints of a process are published by their
    names, and all further ones together as ``other``.

    The counters of a worker that was killed stay as they were published last. Its gauges go when the parent
    calls ``prometheus_client.multiprocess.mark_process_dead(pid)``.

    Args:
        interval_s: how often it publishes, in seconds.
        timeout_s: for how many seconds it waits for other event loops of this process each time.

    Raises:
        UsageError: prometheus_client is not in its mode for several processes.
        ValueError: the interval is not positive, or the timeout is negative.
    """

    def __init__(self, *, interval_s: float = 5.0, timeout_s: float = 1.0) -> None:
        if not 0 < interval_s < inf:
            raise ValueError(f"interval_s must be positive, got {interval_s}")
        if not getattr(values.ValueClass, "_multiprocess", False):
            raise UsageError(
                "prometheus_client keeps its numbers in this process alone: set PROMETHEUS_MULTIPROC_DIR to "
                "a folder before anything imports it, or register an AioTensorCollector instead"
            )
        self._timeout_s = _timeout(timeout_s)
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "new" if self._task is None else "closed" if self._task.done() else "open"
        return f"<MultiprocessPublisher {state}, interval_s={self._interval_s:g}>"

    async def __aenter__(self) -> Self:
        """Publish for the first time, and go on.

        Raises:
            UsageError: it was opened before.
            OSError: the folder cannot be written to, or the machine has no threads left.
        """
        if self._task is not None:
            raise UsageError("this MultiprocessPublisher was opened before: make a new one")
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
                    "publishing for prometheus_client failed, and is tried again: %s",
                    error,
                    extra={"event": "publishing_failed", "reason": str(error)},
                )

    async def _publish(self) -> None:
        # Files grow now and then, and other loops may take their time to answer: nothing else is to wait for
        # a thread meanwhile, so this has one of its own.
        await in_thread(self._publish_now, limiter=anyio.CapacityLimiter(1))

    def _publish_now(self) -> None:
        with _publishing:
            report = _totals.take(opened.look(self._timeout_s))
            _write(_families(report, _totals.timeouts))


def _write(metrics: Iterable[Metric]) -> None:
    """Copy numbers into the files of prometheus_client."""
    gone = {key for key, published in _published.items() if published.is_gauge}
    for metric in metrics:
        mode = "livemax" if metric.name in LARGEST else "livesum"
        below: dict[tuple[str, ...], float] = {}  # of a histogram's buckets, which are kept one by one
        for sample in metric.samples:
            amount = sample.value
            if sample.name.endswith("_bucket"):
                series = tuple(value for label, value in sample.labels.items() if label != "le")
                below[series], amount = amount, amount - below.get(series, 0.0)
            elif metric.type == "histogram" and sample.name.endswith("_count"):
                continue  # the sum of these
            key = (sample.name, tuple(sample.labels.items()))
            gone.discard(key)
            before = _published.get(key)
            if before is None:
                before = _Published(
                    _new_value(metric, sample.name, sample.labels, mode), 0.0, metric.type == "gauge"
                )
            if before.is_gauge:
                before.value.set(amount)
            else:
                # Not set: the file may be that of an earlier process with the same number.
                before.value.inc(amount - before.amount)
            _published[key] = before._replace(amount=amount)
    for key in gone:
        _published[key].value.set(0.0)


def _new_value(metric: Metric, name: str, labels: dict[str, str], mode: str) -> _Value:
    make: Any = values.ValueClass
    value: _Value = make(
        metric.type,
        metric.name,
        name,
        tuple(labels),
        tuple(labels.values()),
        metric.documentation,
        multiprocess_mode=mode,
    )
    return value


def _renew() -> None:
    """Forget what the parent published: a forked child has files of its own."""
    global _publishing, _totals
    _published.clear()
    _totals = _Totals()
    _publishing = threading.Lock()


os.register_at_fork(after_in_child=_renew)
