"""The columns of the table of each workload, and their meaning. Without I/O."""

from collections.abc import Callable
from statistics import median

from bench.measure import format_count, format_rate, format_seconds
from bench.records import Result

_MIB = 1 << 20

Cell = Callable[[Result], str]
_Columns = dict[str, Cell]


def _ratio(result: Result) -> str:
    if not result.ratios:
        return "-"
    if set(result.ratios) == {1.0}:
        return "1"  # the baseline
    text = f"{format_count(median(result.ratios))}x"
    if len(result.ratios) > 1:
        text += f" ({format_count(min(result.ratios))} to {format_count(max(result.ratios))})"
    return text


def _seconds(*names: str) -> Cell:
    return lambda result: " / ".join(format_seconds(result.numbers[name]) for name in names)


def _lateness(of: str) -> Cell:
    return _seconds(*(f"{of}_{percentile}_s" for percentile in ("p50", "p99", "p999", "max")))


def _rate(result: Result) -> str:
    if result.size_bytes < _MIB:
        return f"{format_rate(result.numbers['tensors_per_s'])} /s"
    return f"{format_count(result.numbers['gigabytes_per_s'])} GB/s"


_RATIO: _Columns = {"against the baseline": _ratio}
_TIMES: _Columns = {"median / p99": _seconds("median_s", "p99_s")}
_RATES: _Columns = {"rate": _rate} | _RATIO
_CPU: _Columns = {"CPU": lambda result: f"{result.numbers['cpu_percent']:.2f} %"}
_LAGS: _Columns = {
    "sender, idle": _lateness("idle"),
    "sender, busy": _lateness("busy"),
    "p99.9, busy beyond idle": _seconds("beyond_p999_s"),
    "receiver, idle": _lateness("receiver_idle"),
    "receiver, busy": _lateness("receiver_busy"),
    "its p99.9, busy beyond idle": _seconds("receiver_beyond_p999_s"),
    "GB/s, busy": lambda result: format_count(result.numbers["gigabytes_per_s"]),
}
_SERVED: _Columns = {
    "requests a second": lambda result: format_rate(result.numbers["requests_per_s"]),
    **_RATIO,
    "latency, p50 / p99": _seconds("median_s", "p99_s"),
    "CPU of a request": _seconds("cpu_s_per_request"),
    "peak memory": lambda result: f"{result.numbers['peak_bytes'] / _MIB:.1f} MiB",
    "event loop late: p99 / p99.9 / max": _seconds("late_p99_s", "late_p999_s", "late_max_s"),
}

_IDLE = "All processes and their descendants, user and system."
_LATE = "Lateness at p50 / p99 / p99.9 / max; of several readers, of the one that is latest."
_REQUESTS = (
    "From the request until one element of the answer was read; the server has read one of the request by "
    "then. Tensors are fresh, in ordinary memory."
)
_SERVING = (
    "1,000 requests (200 in a quick run), at most 400 of them in flight, and 140 permits, in all servers "
    "together. Scaled down for two cores: the video of a request is the first 3, 6 or 9 frames of an H.264 "
    "clip of 640 x 272 pixels, 1.5, 3 or 4.5 MiB, where real ones have 10 to 500 MB. The engine reads all "
    "bytes and answers with a checksum. Lateness is that of a 1 ms ticker in the server where it is highest. "
    "Memory is that of all processes, over their memory before the first request."
)

VIEWS: dict[str, tuple[str, _Columns]] = {
    "round-trip": ("Tensors are fresh, in ordinary memory, and copied both ways.", _TIMES | _RATIO),
    "two-hosts": (
        "The hosts are two network namespaces, which a pair of veth devices connects.",
        _TIMES | _RATIO,
    ),
    "allocated": (
        "From the allocation until the answer was read. Nothing is copied.",
        _TIMES | {"of that, the allocation on the near side": _seconds("allocate_median_s")} | _RATIO,
    ),
    "chain": ("From the allocation until the tensor was read at the end.", _TIMES),
    "pipelined": ("One element of each tensor is read where it arrives.", _RATES),
    "fan-in": ("All senders together. 16 are connected all the time.", _RATES),
    "producers": ("All producers together.", _RATES),
    "loop-lag": (_LATE, _LAGS),
    "idle": (_IDLE, _CPU),
    "request-echo": (_REQUESTS, _TIMES | _RATIO),
    "request-answer": (_REQUESTS, _TIMES | _RATIO),
    "broadcast": (
        "Until the last reader has read one byte of each page. Tensors are fresh, in ordinary memory.",
        _TIMES | _RATIO,
    ),
    "broadcast-lag": (_LATE, _LAGS),
    "broadcast-idle": (_IDLE, _CPU),
    "serving-decoding": (f"{_SERVING} Each server decodes in one thread.", _SERVED),
    "serving-transfer": (
        f"{_SERVING} The frames were decoded before, in ordinary memory, which is not counted.",
        _SERVED,
    ),
}
