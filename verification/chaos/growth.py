"""The decision whether a quantity of a process grows, from the slope of its samples after the warm-up.

The samples are divided into blocks of time, and each block is represented by its median: neighbouring samples
are not independent, and a few outliers should not decide. The slope is the Theil-Sen estimator of the
medians, the median of the slopes of all pairs. Its confidence interval is Sen's, from the distribution of
Kendall's tau, without assumptions about the noise. The growth is the slope times the duration after the
warm-up.

A quantity grows if its growth exceeds the allowance and, with a confidence of 99 %, is not 0. So a quantity
that only varies is flat, such as a pool that fills and empties, if it does so at least four times (and not in
step with the blocks). A real growth below the allowance passes; a longer run would show it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from verification.processes import watch

__all__ = ["ALLOWED", "Sample", "Trend", "grows", "measure", "trend"]

# The permitted growth of each quantity in a run: a small multiple of its usual variation, and far below the
# growth from a leak in every message.
ALLOWED = {
    "private memory, MiB": 8.0,
    "shared memory, MiB": 24.0,
    "thousand objects": 4.0,
    "descriptors": 3.0,
    "threads": 2.0,
    "mappings": 16.0,
}

_FEWEST_SAMPLES = 20
_WARM_UP = 0.25  # the share of the run, from its start, that is not judged
_BLOCKS = 30
_FEWEST_BLOCKS = 8  # fewer cannot give this confidence
_QUANTILE = 2.576  # of the normal distribution, for 99 % on both sides


class Sample(NamedTuple):
    """The quantities of a process at one time, in seconds since the run began."""

    at: float
    numbers: Mapping[str, float]


class Trend(NamedTuple):
    """The growth of a quantity after the warm-up.

    Attributes:
        growth: the estimate.
        least: the lower end of its confidence interval.
        most: the upper end.
        level: the median of the samples.
    """

    growth: float
    least: float
    most: float
    level: float


def measure(pid: int, blocks: int) -> dict[str, float]:
    """Measure a process, whose living objects have a number of memory blocks."""
    return {
        "private memory, MiB": watch.status(pid, "RssAnon") / 1024,
        "shared memory, MiB": watch.status(pid, "RssShmem") / 1024,
        "thousand objects": blocks / 1000,
        "descriptors": watch.descriptors(pid),
        "threads": watch.status(pid, "Threads"),
        "mappings": watch.mappings(pid),
    }


def trend(samples: Sequence[Sample], name: str) -> Trend | None:
    """Fit a line through the samples after the warm-up; return None if there are too few."""
    if len(samples) < _FEWEST_SAMPLES:
        return None
    begin, end = _WARM_UP * samples[-1].at, samples[-1].at
    blocks: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.at >= begin:
            place = min(int((sample.at - begin) / (end - begin) * _BLOCKS), _BLOCKS - 1)
            blocks.setdefault(place, []).append(sample)
    if len(blocks) < _FEWEST_BLOCKS:
        return None
    points = [
        (
            statistics.fmean(sample.at for sample in block),
            statistics.median(sample.numbers[name] for sample in block),
        )
        for block in blocks.values()
    ]
    slopes = sorted(
        (points[later][1] - value) / (points[later][0] - time)
        for earlier, (time, value) in enumerate(points)
        for later in range(earlier + 1, len(points))
    )
    count = len(points)
    spread = _QUANTILE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    below = max(math.floor((len(slopes) - spread) / 2), 0)
    above = min(math.ceil((len(slopes) + spread) / 2), len(slopes) - 1)
    span = end - begin
    level = statistics.median(value for _, value in points)
    return Trend(statistics.median(slopes) * span, slopes[below] * span, slopes[above] * span, level)


def grows(found: Trend, allowance: float) -> bool:
    """Return whether a growth exceeds its allowance and is significant."""
    return found.growth > allowance and found.least > 0
