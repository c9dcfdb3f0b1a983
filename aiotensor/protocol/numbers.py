"""A set of whole numbers that grow: memory for its gaps, not for its members."""

from bisect import bisect_right

__all__ = ["NumberSet"]


class NumberSet:
    """Remember numbers from 0 up as ranges; a million consecutive numbers cost two integers.

    Messages end nearly in the order in which they began, so that the numbers that ended form a few
    ranges: at most one more than there are messages still open.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []  # exclusive, one for each start

    def __contains__(self, number: int) -> bool:
        if not self._stops or number >= self._stops[-1]:
            return False  # nearly always
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def add(self, number: int) -> None:
        """Add a number, unless the set contains it."""
        if self._stops and number == self._stops[-1]:
            self._stops[-1] += 1  # nearly always
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
        """Forget the lowest numbers, if they form more ranges than are to be kept."""
        excess = len(self._starts) - count
        if excess > 0:
            del self._starts[:excess], self._stops[:excess]

    def keep_first(self, count: int) -> None:
        """Forget the highest numbers, if they form more ranges than are to be kept."""
        del self._starts[count:], self._stops[count:]

    def ranges(self) -> list[tuple[int, int]]:
        """List the ranges as (first, one past the last), in order."""
        return list(zip(self._starts, self._stops, strict=True))
