"""The metrics for Prometheus: names, descriptions, the statistics that they come from, and samples."""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from aiotensor.integrations.totals import Totals
from aiotensor.statistics.counters import ERROR_NAMES
from aiotensor.statistics.registry import Counts, Statistics
from aiotensor.types import ClientStatistics, ReceiverStatistics, SenderStatistics, ServerStatistics

__all__ = ["LARGEST", "TABLE", "Counter", "Gauge", "families"]


class Gauge(NamedTuple):
    """A current value: the largest, or otherwise the sum, over the open objects at an endpoint."""

    name: str
    field: str
    help: str
    is_largest: bool = False


class Counter(NamedTuple):
    """A value that only grows."""

    name: str
    field: str
    help: str


_Rows: TypeAlias = tuple[tuple[type[Statistics], tuple[Gauge, ...], tuple[Counter, ...]], ...]

TABLE: _Rows = (
    (
        SenderStatistics,
        (
            Gauge("aiotensor_sender_permits_in_use", "in_flight", "Messages in flight, with a permit each."),
            Gauge("aiotensor_sender_permits_limit", "max_concurrent_videos", "The most messages in flight."),
            Gauge(
                "aiotensor_sender_permits_peak",
                "peak_in_flight",
                "The most messages that one sender had in flight at once.",
                is_largest=True,
            ),
            Gauge("aiotensor_sender_memory_in_use_bytes", "bytes_in_use", "Shared memory in use."),
            Gauge("aiotensor_sender_memory_limit_bytes", "arena_bytes", "The most shared memory in use."),
            Gauge(
                "aiotensor_sender_memory_peak_bytes",
                "peak_bytes_in_use",
                "The most shared memory that one sender had in use at once.",
                is_largest=True,
            ),
            Gauge(
                "aiotensor_sender_memory_warm_bytes",
                "warm_bytes",
                "Shared memory that the system has given, in use or kept for the next tensor.",
            ),
            Gauge(
                "aiotensor_sender_memory_largest_free_bytes",
                "largest_free_bytes",
                "The largest tensor that would get shared memory now if no other call waited.",
                is_largest=True,
            ),
            Gauge(
                "aiotensor_sender_waiting_calls",
                "waiting",
                "Calls that wait for a permit, for memory, or for other copies to end.",
            ),
            Gauge(
                "aiotensor_sender_longest_wait_seconds",
                "longest_wait_s",
                "How long the longest of these has waited.",
                is_largest=True,
            ),
        ),
        (
            Counter("aiotensor_sender_messages_sent", "messages_sent", "Messages announced in full."),
            Counter(
                "aiotensor_sender_messages_discarded",
                "messages_discarded",
                "Messages discarded by either side.",
            ),
            Counter("aiotensor_sender_tensors_sent", "tensors_sent", "Tensors announced to the receiver."),
            Counter("aiotensor_sender_sent_bytes", "bytes_sent", "Bytes of these tensors."),
            Counter(
                "aiotensor_sender_tensors_copied",
                "tensors_copied",
                "Tensors that sending copied into shared memory.",
            ),
            Counter("aiotensor_sender_copied_bytes", "bytes_copied", "Bytes of these tensors."),
            Counter(
                "aiotensor_sender_receivers_lost",
                "receivers_lost",
                "How often the receiver died, closed or refused the sender.",
            ),
        ),
    ),
    (
        ReceiverStatistics,
        (
            Gauge("aiotensor_receiver_senders", "senders", "Senders that are connected."),
            Gauge("aiotensor_receiver_senders_limit", "max_senders", "The most senders at once."),
            Gauge(
                "aiotensor_receiver_waiting_calls", "waiting", "Calls and iterations that wait for a tensor."
            ),
            Gauge(
                "aiotensor_receiver_unclaimed_tensors",
                "unclaimed_tensors",
                "Tensors that are here and that nobody has taken.",
            ),
            Gauge("aiotensor_receiver_unclaimed_bytes", "unclaimed_bytes", "Bytes of these tensors."),
            Gauge(
                "aiotensor_receiver_mapped_bytes",
                "mapped_bytes",
                "Shared memory of senders that is mapped, or may yet be.",
            ),
            Gauge("aiotensor_receiver_mapped_limit_bytes", "max_mapped_bytes", "The most of that."),
            Gauge(
                "aiotensor_receiver_promised_messages",
                "promised_messages",
                "Messages that the senders may have unclaimed here at once.",
            ),
            Gauge(
                "aiotensor_receiver_promised_messages_limit", "max_unclaimed_messages", "The most of these."
            ),
            Gauge(
                "aiotensor_receiver_leases",
                "leases",
                "Blocks of shared memory pinned by tensors that were taken and are alive.",
            ),
            Gauge("aiotensor_receiver_leased_bytes", "leased_bytes", "Bytes of the tensors that pin them."),
            Gauge(
                "aiotensor_receiver_leased_peak_bytes",
                "peak_leased_bytes",
                "The most bytes that one receiver had leased at once.",
                is_largest=True,
            ),
        ),
        (
            Counter("aiotensor_receiver_tensors_taken", "tensors_taken", "Tensors that were received."),
            Counter("aiotensor_receiver_taken_bytes", "bytes_taken", "Bytes of these tensors."),
            Counter(
                "aiotensor_receiver_tensors_copied", "tensors_copied", "Tensors that were received as copies."
            ),
            Counter("aiotensor_receiver_copied_bytes", "bytes_copied", "Bytes of these tensors."),
            Counter(
                "aiotensor_receiver_messages_discarded",
                "messages_discarded",
                "Messages discarded by either side.",
            ),
            Counter(
                "aiotensor_receiver_senders_lost", "senders_lost", "Senders that died or broke the link."
            ),
            Counter(
                "aiotensor_receiver_senders_refused",
                "senders_refused",
                "Senders that were refused, because of a limit or of their version, and unidentified "
                "connections that newer ones replaced.",
            ),
        ),
    ),
    (
        ClientStatistics,
        (
            Gauge("aiotensor_client_servers", "servers", "Servers that are connected."),
            Gauge(
                "aiotensor_client_in_flight",
                "in_flight",
                "Messages that are being sent, or wait for an answer.",
            ),
            Gauge(
                "aiotensor_client_waiting",
                "waiting",
                "Messages that wait until one of several servers can take them.",
            ),
        ),
        (
            Counter("aiotensor_client_messages_sent", "messages_sent", "Messages handed to ZeroMQ."),
            Counter("aiotensor_client_answers", "answers", "Requests that were answered."),
            Counter("aiotensor_client_failures", "failures", "Requests that ended with an error."),
            Counter("aiotensor_client_cancelled", "cancelled", "Requests that were cancelled here."),
            Counter(
                "aiotensor_client_servers_lost",
                "servers_lost",
                "How often a server died, closed or refused the client.",
            ),
        ),
    ),
    (
        ServerStatistics,
        (
            Gauge("aiotensor_server_clients", "clients", "Clients that are connected."),
            Gauge("aiotensor_server_clients_limit", "max_clients", "The most clients at once."),
            Gauge("aiotensor_server_waiting_messages", "waiting", "Messages that nobody has taken."),
            Gauge(
                "aiotensor_server_waiting_bytes",
                "waiting_bytes",
                "Bytes of these messages, without the tensors that travel by a sender.",
            ),
            Gauge(
                "aiotensor_server_in_hand",
                "in_hand",
                "Messages that were taken, and neither answered nor given up.",
            ),
        ),
        (
            Counter("aiotensor_server_messages_received", "messages_received", "Messages that have arrived."),
            Counter("aiotensor_server_answers", "answers", "Messages that were answered."),
            Counter("aiotensor_server_failures", "failures", "Messages that were answered with an error."),
            Counter(
                "aiotensor_server_cancelled",
                "cancelled",
                "Messages that their clients gave up, or were lost with.",
            ),
            Counter(
                "aiotensor_server_clients_lost",
                "clients_lost",
                "Clients that died, closed or broke the protocol.",
            ),
            Counter(
                "aiotensor_server_clients_refused",
                "clients_refused",
                "Clients that were refused, because of a limit or of their version.",
            ),
        ),
    ),
)

_ERRORS: tuple[tuple[type[Statistics], str, str], ...] = (
    (SenderStatistics, "aiotensor_sender_errors", "Calls of senders that raised an error."),
    (ReceiverStatistics, "aiotensor_receiver_errors", "Calls of receivers that raised an error."),
    (ClientStatistics, "aiotensor_client_errors", "Calls of clients that raised an error."),
)

LARGEST = {gauge.name for _, gauges, _ in TABLE for gauge in gauges if gauge.is_largest}


def families(totals: Totals) -> Iterator[Metric]:
    """Return all metrics with a sample for each endpoint; without endpoints, only the metrics."""
    yield CounterMetricFamily(
        "aiotensor_scrape_timeouts", "Event loops that did not answer a scrape in time.", totals.timeouts
    )
    for kind, gauges, counters in TABLE:
        present: dict[str, list[Statistics]] = {}
        for endpoint, statistics in totals.present:
            if isinstance(statistics, kind):
                present.setdefault(endpoint, []).append(statistics)
        counted = {endpoint: counts for (of, endpoint), counts in totals.counts.items() if of is kind}
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
        for of, name, text in _ERRORS:
            if of is kind:
                yield _errors(name, text, counted)


def _amount(value: int | float | tuple[int, ...] | None) -> float:
    """Return the number of a gauge; None is an infinite limit."""
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
            for (name, bound), number in counts.items():  # in ascending order; the last bound is ""
                if name == field and bound != "total_s":
                    below += number
                    buckets.append((bound or "+Inf", below))
            family.add_metric([endpoint, what], buckets, counts[field, "total_s"])
    return family


def _errors(name: str, text: str, counted: dict[str, Counts]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["endpoint", "type"])
    for endpoint, counts in counted.items():
        # All types from the beginning: Prometheus sees no increase in the first sample of a series.
        for kind in ERROR_NAMES:
            family.add_metric([endpoint, kind], counts.get(("errors", kind), 0))
    return family
