"""The decision whether a quantity grows, from the slope of its samples after the warm-up. Without I/O.

The samples are divided into blocks of time, and each block is represented by its median: neighbouring samples
are not independent (a tensor that is kept for seconds affects many of them), and a few outliers should not
decide. The slope is the Theil-Sen estimator of the medians, the median of the slopes of all pairs. Its
confidence interval is Sen's, from the distribution of Kendall's tau, without assumptions about the noise. The
growth is the slope times the duration after the warm-up.

A quantity grows if its growth exceeds the allowance and, with a confidence of 99 %, is not 0. So a quantity
that only varies is flat, such as a pool that fills and empties, if it does so at least four times (and not in
step with the blocks). A real growth below the allowance passes; a longer run would show it.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["WARM_UP", "Trend", "grows", "trend"]

WARM_UP = 0.25  # the share of the run, from its start, that is not judged

_BLOCKS = 30
_FEWEST_BLOCKS = 8  # fewer cannot give this confidence
_QUANTILE = 2.576  # of the normal distribution, for 99 % on both sides


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


def trend(times: Sequence[float], values: Sequence[float]) -> Trend | None:
    """Fit a line through the samples after the warm-up; return None if there are too few.

    Args:
        times: the times of the samples, in order; the run began at 0 and ended with the last one.
        values: the values at those times.
    """
    if not times:
        return None
    begin, end = WARM_UP * times[-1], times[-1]
    blocks: dict[int, list[tuple[float, float]]] = {}
    for time, value in zip(times, values, strict=True):
        if time >= begin:
            place = min(int((time - begin) / (end - begin) * _BLOCKS), _BLOCKS - 1) if end > begin else 0
            blocks.setdefault(place, []).append((time, value))
    if len(blocks) < _FEWEST_BLOCKS:
        return None
    points = [
        (statistics.fmean(time for time, _ in block), statistics.median(value for _, value in block))
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
