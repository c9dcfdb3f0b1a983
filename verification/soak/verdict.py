"""Whether a quantity grows: the slope of its samples after the warm-up, and how sure that slope is. Pure.

The samples are cut into blocks of time, and the median of each counts: neighbouring samples are not
independent (a tensor that is kept for seconds is in many of them), and a few outliers should not decide.
Through the medians goes the slope of Theil and Sen, the median of the slopes of all pairs; its confidence
interval is Sen's, from the distribution of Kendall's tau, and asks nothing of how the noise is distributed.
The slope times the time after the warm-up is the growth.

A quantity grows if the growth is more than its allowance and, with a confidence of 99 %, is not 0. So it is
flat if it only goes up and down, as a pool does that fills and gives back, if it does so four times or more
(and not to the beat of the blocks). A growth that is real but below the allowance is let pass: it shows in a
longer run.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["WARM_UP", "Trend", "grows", "trend"]

WARM_UP = 0.25  # of the run, from its start, is left out

_BLOCKS = 30
_FEWEST_BLOCKS = 8  # with fewer there is no such confidence
_QUANTILE = 2.576  # of the normal distribution, for 99 % on both sides


class Trend(NamedTuple):
    """How much a quantity grew over the time that was looked at.

    Attributes:
        growth: the best guess.
        least: the lower end of its confidence interval.
        most: the upper end.
        level: the median of the samples.
    """

    growth: float
    least: float
    most: float
    level: float


def trend(times: Sequence[float], values: Sequence[float]) -> Trend | None:
    """Fit a line through samples, the warm-up left out; None if there are too few of them.

    Args:
        times: of the samples, in order; the run began at 0 and ended with the last.
        values: at those times.
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
    """Say whether a growth is more than is allowed, and surely no noise."""
    return found.growth > allowance and found.least > 0
