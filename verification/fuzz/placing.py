"""The segments of a rogue, and the tensors that it places in them or in frames."""

import math

from aiotensor.protocol.frames import ARENA
from aiotensor.tensors.dtypes import DTYPES
from verification.fuzz.choosers import Chooser, happens, one_of
from verification.fuzz.things import MEMORY_KINDS, OTHER_THINGS, SEGMENT_BYTES, WHERE
from verification.fuzz.traces import with_trace
from verification.fuzz.wire import BOUNDARIES, Frame, Scalar, boundary

__all__ = ["ANYTHING", "BLOCK", "DTYPE_NAMES", "Segments", "attributes", "put_frame", "small_shape"]

ANYTHING = (*OTHER_THINGS, "itself")
BLOCK = 8  # the position of the number of a block in the frame of a tensor
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


def put_frame(
    chooser: Chooser, one_in: int, segments: Segments, names: tuple[int, int], block: int, *, last: bool
) -> Frame:
    """Announce a tensor in a segment, with the number of its block, or in the frame.

    Args:
        chooser: decides.
        one_in: how seldom something is wrong.
        segments: those in which it may be placed.
        names: the numbers of its message and of the tensor within the message.
        block: the number of its block, if it has one.
        last: whether it completes its message.
    """
    dtype = one_of(chooser, DTYPE_NAMES)
    itemsize = DTYPES[dtype].itemsize
    in_memory = bool(segments.sizes) and chooser.number(0, 2) > 0
    shape = segments.shape(itemsize) if in_memory else small_shape(chooser)
    nbytes = math.prod(shape) * itemsize
    placement, payload = "inline", chooser.data(nbytes if nbytes < 300 else 0)
    if in_memory:
        placement, payload = ARENA, segments.place(nbytes, itemsize)
    if happens(chooser, 2 * one_in):
        shape = [boundary(chooser) for _ in range(chooser.number(0, 4))]
    where = [placement, payload, block if in_memory else None]
    frame: Frame = ["put", *names, dtype, shape, "cpu", *where, last]
    if happens(chooser, 4):
        frame.append(attributes(chooser, one_in, dtype, len(shape)))
    return with_trace(chooser, one_in, frame, 11)


def attributes(chooser: Chooser, one_in: int, dtype: str, dimensions: int) -> Frame:
    """Choose the attributes of a tensor: whether it requires a gradient and is a parameter, and its order."""
    may_require = DTYPES[dtype].is_floating_point or happens(chooser, one_in)
    order: list[Scalar] = [*range(dimensions)]
    if happens(chooser, 2):
        order.reverse()
    if happens(chooser, one_in):
        order.append(boundary(chooser))
    return [may_require and chooser.number(0, 1) == 1, chooser.number(0, 1) == 1, order]
