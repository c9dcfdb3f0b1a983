"""The source of a generator's choices: bytes, which are random or which a fuzzer mutates."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# One choice in 100, 20 or 5 is invalid: some conversations have a single fault, and others many.
WILDNESS = (100, 20, 5)


class Chooser:
    """Derive choices from a string of bytes; after its end, every choice is the lowest and plainest one."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._position = 0

    def number(self, low: int, high: int) -> int:
        """Choose a number between two bounds, which are included."""
        width = ((high - low).bit_length() + 7) // 8
        return low + int.from_bytes(self._take(width)) % (high - low + 1)

    def data(self, length: int) -> bytes:
        """Choose bytes."""
        return self._take(length).ljust(length, b"\0")

    def _take(self, count: int) -> bytes:
        taken = self._source[self._position : self._position + count]
        self._position += count
        return taken


def one_of(chooser: Chooser, options: Sequence[T]) -> T:
    """Choose an option; the first one is the plainest."""
    return options[chooser.number(0, len(options) - 1)]


def happens(chooser: Chooser, one_in: int) -> bool:
    """Decide whether to do something unusual, once in `one_in` times."""
    return chooser.number(0, one_in - 1) == one_in - 1
