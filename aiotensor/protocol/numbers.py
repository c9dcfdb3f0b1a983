"""A compact set of numbers, whose memory grows with its gaps and not with its members."""

from bisect import bisect_right

__all__ = ["NumberSet"]


class NumberSet:
    """A set of non-negative integers, stored as ranges: a million consecutive numbers take two integers.

    Messages end nearly in the order in which they began, so the numbers of ended messages form few ranges: at
    most one more than there are open messages.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []  # exclusive, one for each start

    def __contains__(self, number: int) -> bool:
        if not self._stops or number >= self._stops[-1]:
            return False  # the usual case
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def add(self, number: int) -> None:
        """Add a number; this has no effect if the set contains it."""
        if self._stops and number == self._stops[-1]:
            self._stops[-1] += 1  # the usual case
            return
        index = bisect_right(self._starts, number)  # of the first range that starts above the number
        if index and number < self._stops[index - 1]:
            return
        joins_below = index > 0 and self._stops[index - 1] == number
        joins_above = index < len(self._starts) and self._starts[index] == number + 1
        if joins_below and joins_above:
            self._stops[index - 1] = self._stops[index]
            del self._starts[index], self._stops[index]
        elif joins_below:
            self._stops[index - 1] = number + 1
        elif joins_above:
            self._starts[index] = number
        else:
            self._starts.insert(index, number)
            self._stops.insert(index, number + 1)

    def keep_last(self, count: int) -> None:
        """Keep at most the last `count` ranges, and forget the numbers below them."""
        excess = len(self._starts) - count
        if excess > 0:
            del self._starts[:excess], self._stops[:excess]

    def keep_first(self, count: int) -> None:
        """Keep at most the first `count` ranges, and forget the numbers above them."""
        del self._starts[count:], self._stops[count:]

    def ranges(self) -> list[tuple[int, int]]:
        """List the ranges as (first, one past the last), in order."""
        return list(zip(self._starts, self._stops, strict=True))
