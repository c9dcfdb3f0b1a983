"""The metrics agree with those of Prometheus, which derive from the same declarations."""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from opentelemetry.metrics import CallbackOptions, NoOpMeter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData, NumberDataPoint
from opentelemetry.trace import NoOpTracerProvider

from aiotensor import TensorReceiver, TensorSender, WouldBlockError, blocking
from aiotensor.integrations.opentelemetry import instrument, uninstrument
from aiotensor.integrations.opentelemetry import metrics as metrics_module
from aiotensor.integrations.prometheus import AioTensorCollector
from verification.patterns import BIG, pattern
from verification.waiting import settled

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

# The values of the attributes of a sample, by the name of the metric.
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@contextmanager
def metrics() -> Iterator[InMemoryMetricReader]:
    """Instrument this process for metrics only."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    instrument(NoOpTracerProvider(), provider)
    try:
        yield reader
    finally:
        uninstrument()
        provider.shutdown()


def samples(reader: InMemoryMetricReader, endpoint: str) -> Samples:
    """Collect the metrics of one endpoint."""
    data = reader.get_metrics_data()
    found: Samples = {}
    if isinstance(data, MetricsData):
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        assert isinstance(point, NumberDataPoint)
                        attributes = {name: str(value) for name, value in (point.attributes or {}).items()}
                        if attributes.pop("endpoint") == endpoint:
                            found[metric.name, frozenset(attributes.items())] = point.value
    return found


def number(found: Samples, name: str, **attributes: str) -> float:
    return found[name, frozenset(attributes.items())]


def of_prometheus(endpoint: str) -> Samples:
    """Return the samples of the Prometheus metrics under the names of OpenTelemetry, except histograms."""
    found: Samples = {}
    for metric in AioTensorCollector().collect():
        for sample in metric.samples:
            labels = dict(sample.labels)
            if metric.type != "histogram" and labels.pop("endpoint", "") == endpoint:
                name = metric.name.replace("_", ".", 2)
                if sample.value < inf:
                    found[name, frozenset(labels.items())] = sample.value
    return found


async def test_the_metrics_agree_with_those_of_prometheus(address: str) -> None:
    with metrics() as reader:
        async with (
            TensorReceiver(address, max_senders=None) as receiver,
            TensorSender(address, max_concurrent_videos=1) as sender,
        ):
            for size in (3, BIG):
                await receiver.receive(await sender.send(pattern(0, size)))
                await settled(sender)
            await sender.send(pattern(0, 3))
            with pytest.raises(WouldBlockError):
                sender.send_nowait(pattern(0, 3))

            found, expected = samples(reader, address), of_prometheus(address)
            histograms = {"aiotensor.sender.wait_seconds", "aiotensor.sender.wait_count"}
            assert {key: value for key, value in found.items() if key[0] not in histograms} == expected
            assert number(found, "aiotensor.sender.tensors_sent") == 3
            assert number(found, "aiotensor.sender.errors", type="WouldBlockError") == 1
            assert number(found, "aiotensor.sender.permits_in_use") == 1
            assert ("aiotensor.receiver.senders_limit", frozenset()) not in found  # there is no limit

        closed = samples(reader, address)
        assert number(closed, "aiotensor.sender.tensors_sent") == 3
        assert ("aiotensor.sender.permits_in_use", frozenset()) not in closed
    assert not samples(reader, address)


async def test_waits_are_counted_by_their_duration(address: str) -> None:
    with metrics() as reader:
        async with (
            TensorReceiver(address) as receiver,
            TensorSender(address, max_concurrent_videos=1) as sender,
        ):
            first = await sender.send(pattern(0, 3))
            second = asyncio.create_task(sender.send(pattern(0, 3)))
            await asyncio.sleep(0.02)  # the duration to count
            await receiver.receive(first)
            await second
            waits = sender.statistics().permit_waits

            found = samples(reader, address)
    counts = {
        attributes["at_most_s"]: int(value)
        for (name, items), value in found.items()
        if name == "aiotensor.sender.wait_count" and (attributes := dict(items))["for"] == "permit"
    }
    assert counts == dict(zip([*map(str, waits.bounds_s), "inf"], waits.counts, strict=True))
    assert sum(counts.values()) == 1
    assert number(found, "aiotensor.sender.wait_seconds", **{"for": "permit"}) == waits.total_s > 0.01


async def test_the_metrics_of_objects_in_other_threads_are_read(address: str) -> None:
    def use() -> Samples:
        with blocking.TensorReceiver(address) as receiver, blocking.TensorSender(address) as sender:
            receiver.receive(sender.send(pattern(0, 3)))
            return samples(reader, address)

    with metrics() as reader:
        found = await asyncio.to_thread(use)
    assert number(found, "aiotensor.sender.tensors_sent") == 1
    assert number(found, "aiotensor.receiver.tensors_taken") == 1


class _Callbacks(NoOpMeter):
    """A meter whose collections take no lock, so that a signal handler may collect."""

    def __init__(self) -> None:
        super().__init__("a meter")
        self.callbacks: list[Callable[[CallbackOptions], Iterable[Observation]]] = []

    def create_observable_gauge(self, name: str, callbacks: Any = None, *_: Any) -> Any:
        """Keep the callbacks."""
        self.callbacks += callbacks

    create_observable_counter: Any = create_observable_gauge
    create_observable_up_down_counter: Any = create_observable_gauge

    def collect(self) -> None:
        """Collect the numbers of a few instruments, which share their totals."""
        for callback in self.callbacks[:3]:
            list(callback(CallbackOptions()))


def test_a_signal_handler_may_collect_amid_another_collection() -> None:
    meter = _Callbacks()
    provider = mock.create_autospec(MeterProvider, instance=True)
    provider.get_meter.return_value = meter
    collected = 0

    def handle(*_: object) -> None:
        nonlocal collected
        sys.settrace(None)
        meter.collect()
        collected += 1
        sys.settrace(interrupt)

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != metrics_module.__file__:
            return None
        if event == "line":
            signal.raise_signal(signal.SIGUSR1)
        return interrupt

    instrument(NoOpTracerProvider(), provider)
    before, tracing = signal.signal(signal.SIGUSR1, handle), sys.gettrace()
    try:
        sys.settrace(interrupt)
        meter.collect()
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGUSR1, before)
        uninstrument()
    assert collected > 10  # at each line of each callback


async def test_instrumenting_again_with_the_same_provider_exports_each_metric_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    async with TensorReceiver(address):
        for _ in range(2):
            instrument(NoOpTracerProvider(), provider)
            assert number(samples(reader, address), "aiotensor.receiver.senders") == 0
            uninstrument()
            assert not samples(reader, address)
    provider.shutdown()
    assert not caplog.records
