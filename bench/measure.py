"""Units and the few statistics of a run. Without I/O, clocks or processes."""

import math
import re
import statistics
from collections.abc import Sequence

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the number of bytes that a text such as ``4KiB``, ``1.5 MiB`` or ``4096`` states."""
    units = {name.lower(): scale for name, scale in _UNITS.items()}
    match = _SIZE.fullmatch(text.strip())
    scale = units.get((match[2] or "B").lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"{text!r} is not a size; write for example 4KiB, 16MiB or 4096")
    size = float(match[1]) * scale
    if size < 1 or size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes, one or more")
    return int(size)


def format_size(size: int) -> str:
    """Format a number of bytes in the largest unit of which it contains at least one."""
    name, scale = next(
        (name, scale) for name, scale in reversed(_UNITS.items()) if size >= scale or scale == 1
    )
    return f"{size / scale:.4g} {name}"


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits, in us, ms or s."""
    for scale, unit in ((1e-6, "us"), (1e-3, "ms")):
        # 999.5 would be written as 1e+03; it belongs to the next unit.
        if abs(seconds) < 999.5 * scale:
            return f"{format_count(seconds / scale)} {unit}"
    return f"{format_count(seconds)} s"


def format_rate(per_second: float) -> str:
    """Format a rate per second with three significant digits and a thousands separator."""
    if per_second < 999.5:
        return format_count(per_second)
    scale: float = 10 ** (len(str(round(per_second))) - 3)
    return f"{round(per_second / scale) * scale:,.0f}"


def format_count(value: float) -> str:
    """Format a number without a unit, with three digits."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed.

    This is the nearest rank: always a value that was measured. Of fewer than 100 values, p99 is the largest.
    """
    if not values:
        raise ValueError("there is no percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, not at {percent}")
    rank = max(1, math.ceil(percent * len(values) / 100))
    return sorted(values)[rank - 1]


def share(total: int, parts: int, number: int) -> int:
    """Return one part of a total that is divided into whole numbers as evenly as possible."""
    return total // parts + (number < total % parts)


def summarize(latencies_ns: Sequence[int]) -> dict[str, float]:
    """Reduce latencies in nanoseconds to seconds."""
    return {
        "median_s": statistics.median(latencies_ns) / 1e9,
        "p99_s": percentile(latencies_ns, 99) / 1e9,
    }
