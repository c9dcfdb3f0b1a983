"""The layout of the results of each workload: the cells and their meaning. Without I/O."""

from collections.abc import Callable
from typing import NamedTuple

from bench.measure import format_count, format_rate, format_seconds
from bench.records import Result

__all__ = ["VIEWS", "Cell", "Flat", "Pivot"]

_MIB = 1 << 20

Cell = Callable[[Result], str]


class Pivot(NamedTuple):
    """A row for each contender, a column for each size and number of peers."""

    caption: str
    cell: Cell


class Flat(NamedTuple):
    """A row for each contender and size, a column for each number."""

    caption: str
    columns: dict[str, Cell]


def _ratio(result: Result) -> str:
    if result.ratio is None:
        return "-"
    if set(result.round_ratios) == {1.0}:
        return "1"  # the baseline
    text = f"{format_count(result.ratio)}x"
    if len(result.round_ratios) > 1:
        low, high = min(result.round_ratios), max(result.round_ratios)
        text += f" ({format_count(low)} to {format_count(high)})"
    return text


def _seconds(*names: str) -> Cell:
    return lambda result: " / ".join(format_seconds(result.numbers[name]) for name in names)


def _lateness(of: str) -> Cell:
    return _seconds(*(f"{of}_{percentile}_s" for percentile in ("p50", "p99", "p999", "max")))


def _percent(result: Result) -> str:
    return f"{result.numbers['cpu_percent']:.2f} %"


def _rate(result: Result) -> str:
    if result.size_bytes < _MIB:
        return f"{format_rate(result.numbers['tensors_per_s'])} /s"
    return f"{format_count(result.numbers['gigabytes_per_s'])} GB/s"


def _gigabytes(result: Result) -> str:
    return format_count(result.numbers["gigabytes_per_s"])


def _bytes(*names: str) -> Cell:
    return lambda result: " / ".join(_size(result.numbers[name]) for name in names)


def _size(value: float) -> str:
    # Memory goes up and down, and tenths of a MiB are enough.
    return f"{round(value / _MIB, 1) + 0.0:.1f} MiB"  # and no negative zero


_TIMES = (
    "The same, as times faster than the baseline: the middle round, in brackets the lowest and the highest."
)

_REQUESTS: list[Pivot | Flat] = [
    Pivot(
        "Median / p99 of all rounds, from the request until one element of the answer was read; the server "
        "has read one of the request by then. Tensors are fresh, in ordinary memory. Of fewer than 100 "
        "requests, p99 is the slowest.",
        _seconds("median_s", "p99_s"),
    ),
    Pivot(f"{_TIMES} The baseline is zmq-request.", _ratio),
]

_SERVING = (
    "1,000 requests (200 in a quick run), at most 400 of them in flight, and 140 permits, in all servers "
    "together. Scaled down for two cores: the video of a request is the first 3, 6 or 9 frames of an H.264 "
    "clip of 640 x 272 pixels, 1.5, 3 or 4.5 MiB, where real ones have 10 to 500 MB. The engine reads all "
    "bytes and answers with a checksum. Lateness is that of a 1 ms ticker in the server where it is highest. "
    "Memory is that of all processes, over their memory before the first request; afterwards, all objects "
    "are idle and open. The baseline is torch-queue-handles."
)
_DECODING = "Each server decodes in one thread."
_TRANSFER = "The frames were decoded before, in ordinary memory, which is not counted."
_SERVED: dict[str, Cell] = {
    "requests a second": lambda result: format_rate(result.numbers["requests_per_s"]),
    "against the baseline": _ratio,
    "latency, p50 / p99": _seconds("median_s", "p99_s"),
    "CPU of a request": _seconds("cpu_s_per_request"),
    "peak memory": _bytes("peak_bytes"),
    "event loop late: p99 / p99.9 / max": _seconds("late_p99_s", "late_p999_s", "late_max_s"),
    "afterwards: private / shared": _bytes("after_private_bytes", "after_shared_bytes"),
}

VIEWS: dict[str, list[Pivot | Flat]] = {
    "round-trip": [
        Pivot(
            "Median / p99 of all rounds. Tensors are fresh, in ordinary memory, and copied both ways. Of "
            "fewer than 100 trips, p99 is the slowest.",
            _seconds("median_s", "p99_s"),
        ),
        Pivot(_TIMES, _ratio),
    ],
    "two-hosts": [
        Pivot(
            "Median / p99 of all rounds. The hosts are two network namespaces, which a pair of veth devices "
            "connects. Of fewer than 100 trips, p99 is the slowest.",
            _seconds("median_s", "p99_s"),
        ),
        Pivot(f"{_TIMES} The baseline is gloo.", _ratio),
    ],
    "allocated": [
        Pivot(
            "Median / p99 of all rounds, from the allocation until the answer was read. Nothing is copied.",
            _seconds("median_s", "p99_s"),
        ),
        Pivot("Of that, the allocation on the near side: median.", _seconds("allocate_median_s")),
    ],
    "chain": [
        Pivot(
            "Median / p99 of all rounds, from the allocation until the tensor was read at the end.",
            _seconds("median_s", "p99_s"),
        )
    ],
    "pipelined": [
        Flat(
            "One element of each tensor is read where it arrives.",
            {"tensors a second": _rate, "against the baseline": _ratio},
        )
    ],
    "fan-in": [
        Pivot("All senders together. 16 are connected all the time.", _rate),
        Pivot("The same, as times the rate of the baseline.", _ratio),
    ],
    "producers": [Flat("", {"tensors a second": _rate, "against the baseline": _ratio})],
    "loop-lag": [
        Flat(
            "Lateness at p50 / p99 / p99.9 / max.",
            {
                "sender, idle": _lateness("idle"),
                "sender, busy": _lateness("busy"),
                "p99.9, busy beyond idle": _seconds("beyond_p999_s"),
                "receiver, idle": _lateness("receiver_idle"),
                "receiver, busy": _lateness("receiver_busy"),
                "its p99.9, busy beyond idle": _seconds("receiver_beyond_p999_s"),
                "GB/s, busy": _gigabytes,
            },
        )
    ],
    "idle": [
        Flat(
            "Both processes and their descendants, user and system.",
            {"CPU": _percent},
        )
    ],
    "cost": [
        Flat(
            "One way, one tensor after the other. CPU of both processes and their descendants; "
            "peak increase of the shared memory of the whole machine.",
            {
                "CPU-seconds per GB": lambda result: format_count(result.numbers["cpu_s_per_gb"]),
                "GB/s": _gigabytes,
                "peak shared memory": _bytes("peak_shared_bytes"),
            },
        )
    ],
    "resident": [
        Flat(
            "Anonymous memory at the start / after a tenth of the sends / at the end. Memory is not flat "
            "if it grows in each third of the rest.",
            {
                "sends": lambda result: f"{result.numbers['sends']:,.0f}",
                "sender": _bytes("sender_start_bytes", "sender_warm_bytes", "sender_end_bytes"),
                "receiver": _bytes("receiver_start_bytes", "receiver_warm_bytes", "receiver_end_bytes"),
                "growth": _bytes("growth_bytes"),
                "flat": lambda result: "yes" if result.numbers["flat"] else "NO",
            },
        )
    ],
    "request-echo": _REQUESTS,
    "request-answer": _REQUESTS,
    "broadcast": [
        Pivot(
            "Median / p99 of all rounds, until the last reader has read one byte of each page. Tensors are "
            "fresh, in ordinary memory. Of fewer than 100 publications, p99 is the slowest.",
            _seconds("median_s", "p99_s"),
        ),
        Pivot(f"{_TIMES} The baseline is zmq-xpub.", _ratio),
    ],
    "broadcast-allocated": [
        Pivot(
            "Median / p99 of all rounds, from the allocation until the last reader has read one byte of each "
            "page. Nothing is copied.",
            _seconds("median_s", "p99_s"),
        )
    ],
    "broadcast-stream": [
        Pivot("Tensors a second, or bytes to all readers together.", _rate),
        Pivot("The same, as times the rate of zmq-xpub.", _ratio),
    ],
    "broadcast-lag": [
        Flat(
            "Lateness at p50 / p99 / p99.9 / max; of the reader that is latest.",
            {
                "publisher, idle": _lateness("idle"),
                "publisher, busy": _lateness("busy"),
                "p99.9, busy beyond idle": _seconds("beyond_p999_s"),
                "reader, idle": _lateness("subscriber_idle"),
                "reader, busy": _lateness("subscriber_busy"),
                "its p99.9, busy beyond idle": _seconds("subscriber_beyond_p999_s"),
                "GB/s to all readers, busy": _gigabytes,
            },
        )
    ],
    "broadcast-idle": [Flat("All processes and their descendants, user and system.", {"CPU": _percent})],
    "serving-decoding": [Flat(f"{_SERVING} {_DECODING}", _SERVED)],
    "serving-transfer": [Flat(f"{_SERVING} {_TRANSFER}", _SERVED)],
}
