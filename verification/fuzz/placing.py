"""The segments of a rogue, and the positions of tensors in them."""

from aiotensor.protocol.frames import ARENA
from aiotensor.tensors.dtypes import DTYPES
from verification.fuzz.choosers import Chooser, happens, one_of
from verification.fuzz.things import MEMORY_KINDS, OTHER_THINGS, SEGMENT_BYTES, WHERE
from verification.fuzz.wire import BOUNDARIES, Frame

__all__ = ["ANYTHING", "DTYPE_NAMES", "Segments", "small_shape"]

ANYTHING = (*OTHER_THINGS, "itself")
DTYPE_NAMES = ("uint8", "int64", "float32", *sorted(DTYPES))


class Segments:
    """The segments that a rogue has attached.

    Attributes:
        sizes: their sizes in bytes, by their numbers.
        descriptors: the kinds of the descriptors for the next record.
    """

    def __init__(self, chooser: Chooser, one_in: int) -> None:
        self.sizes: dict[int, int] = {}
        self.descriptors: list[str] = []
        self._chooser = chooser
        self._one_in = one_in
        self._next = 0

    def attach(self, kind: str = "sealed") -> Frame:
        """Attach one more, with its descriptor; a wrong one now and then."""
        chooser = self._chooser
        number, self._next = self._next, self._next + 1
        nbytes = one_of(chooser, SEGMENT_BYTES)
        self.sizes[number] = nbytes
        thing = f"{kind}:{nbytes}"
        if happens(chooser, self._one_in):
            thing = one_of(chooser, (*(f"{kind}:{nbytes}" for kind in MEMORY_KINDS), *ANYTHING))
        if happens(chooser, self._one_in):
            thing = f"sealed:{one_of(chooser, SEGMENT_BYTES)}"
        if happens(chooser, 2 * self._one_in):
            nbytes = self.sizes[number] = one_of(chooser, BOUNDARIES) % 2**63
        self.descriptors += [thing] * (0 if happens(chooser, 2 * self._one_in) else 1)
        return ["attach", number, ARENA, nbytes]

    def taken_descriptors(self) -> list[str]:
        """Return the kinds of the descriptors for this record."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def place(self, nbytes: int, alignment: int) -> bytes:
        """Choose a position for a tensor; a wrong one now and then."""
        chooser = self._chooser
        segment = one_of(chooser, list(self.sizes))
        last = max(0, self.sizes[segment] - nbytes) // alignment
        offset = chooser.number(0, last) * alignment
        if happens(chooser, self._one_in):
            offset = one_of(chooser, (self.sizes[segment], *BOUNDARIES)) % 2**64
        if happens(chooser, 2 * self._one_in):
            segment = one_of(chooser, BOUNDARIES) % 2**64
        payload = WHERE.pack(segment, offset)
        return payload[: chooser.number(0, 15)] if happens(chooser, 3 * self._one_in) else payload

    def shape(self, itemsize: int) -> list[int]:
        """Choose a shape with which a tensor fits into each segment."""
        chooser = self._chooser
        if happens(chooser, 3):
            return [chooser.number(1, min(SEGMENT_BYTES) // itemsize)]
        return small_shape(chooser)


def small_shape(chooser: Chooser) -> list[int]:
    """Choose the shape of a tensor of a few elements."""
    return [chooser.number(1, 4) for _ in range(chooser.number(0, 3))]
