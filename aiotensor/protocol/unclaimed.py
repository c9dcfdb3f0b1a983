"""How much waits to be taken, counted as it comes and goes: whoever asks must not keep an event loop busy."""

from typing import Self

__all__ = ["Unclaimed"]


class Unclaimed:
    """Count tensors that arrived and that nobody has taken, and their bytes.

    Args:
        among: counts these and others.
    """

    __slots__ = ("_among", "nbytes", "tensors")

    def __init__(self, among: Self | None = None) -> None:
        self.tensors = 0
        self.nbytes = 0
        self._among = among

    def add(self, tensors: int, nbytes: int) -> None:
        """Count tensors that came; negative numbers are of those that went."""
        self.tensors += tensors
        self.nbytes += nbytes
        if self._among is not None:
            self._among.add(tensors, nbytes)
