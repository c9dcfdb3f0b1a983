"""The segments of a rogue, and the descriptions of the tensors that it places in them or in frames."""

import math

from aiotensor.memory.tensors import DTYPES
from aiotensor.protocol.frames import ARENA, FORWARDED
from aiotensor.types import MAX_TRACE_FIELDS, MAX_TRACE_NAME, MAX_TRACE_VALUE
from verification.fuzz.things import MEMORY_KINDS, OTHER_THINGS, SEGMENT_BYTES, WHERE
from verification.fuzz.wire import BOUNDARIES, Chooser, Frame, Scalar, boundary

ANYTHING = (*OTHER_THINGS, "itself")
DTYPE_NAMES = ("uint8", "int64", "float32", *sorted(DTYPES))

_PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


class Segments:
    """The segments that a rogue has attached, and the blocks in them.

    Attributes:
        sizes: their sizes in bytes, by their numbers.
        descriptors: the kinds of the descriptors for the next record.
    """

    def __init__(self, chooser: Chooser, one_in: int) -> None:
        self.sizes: dict[int, int] = {}
        self.descriptors: list[str] = []
        self._chooser = chooser
        self._one_in = one_in
        self._next = self._next_block = 0

    def attach(self, kind: str) -> Frame:
        """Attach one more, with its descriptor and some tokens; a wrong one now and then."""
        chooser = self._chooser
        number, self._next = self._next, self._next + 1
        nbytes = chooser.one_of(SEGMENT_BYTES)
        self.sizes[number] = nbytes
        thing = f"{kind}:{nbytes}"
        if chooser.happens(self._one_in):
            thing = chooser.one_of((*(f"{kind}:{nbytes}" for kind in MEMORY_KINDS), *ANYTHING))
        if chooser.happens(self._one_in):
            thing = f"sealed:{chooser.one_of(SEGMENT_BYTES)}"
        if chooser.happens(2 * self._one_in):
            nbytes = self.sizes[number] = chooser.one_of(BOUNDARIES) % 2**63
        self.descriptors += [thing] * (0 if chooser.happens(2 * self._one_in) else 1)
        tokens = chooser.one_of((0, 1, 2, 7))
        given = chooser.one_of(range(9)) if chooser.happens(self._one_in) else tokens
        is_wrong = chooser.happens(self._one_in)
        self.descriptors += [chooser.one_of(OTHER_THINGS) if is_wrong else "pipe" for _ in range(given)]
        placement = FORWARDED if chooser.happens(4) else ARENA
        return ["attach", number, placement, nbytes, tokens, chooser.one_of((64 << 20, 0, 1, nbytes))]

    def taken_descriptors(self) -> list[str]:
        """Return the kinds of the descriptors for this record."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def block(self) -> int:
        """Return the number of a new block."""
        self._next_block += 1
        return self._next_block - 1

    def tensor(self, *, is_inline: bool) -> tuple[str, list[Scalar], str, bytes, int | None]:
        """Place a tensor: return its dtype, shape, placement, payload and block."""
        chooser = self._chooser
        dtype = chooser.one_of(DTYPE_NAMES)
        itemsize = DTYPES[dtype].itemsize
        sizes: list[int] = [chooser.number(1, 4) for _ in range(chooser.number(0, 3))]
        if not is_inline and chooser.happens(3):  # a shape with which it fits into each segment
            sizes = [chooser.number(1, min(SEGMENT_BYTES) // itemsize)]
        nbytes = math.prod(sizes) * itemsize
        shape: list[Scalar] = [*sizes]
        if chooser.happens(2 * self._one_in):
            shape = [boundary(chooser) for _ in range(chooser.number(0, 4))]
        if is_inline:
            return dtype, shape, "inline", chooser.data(nbytes if nbytes < 300 else 0), None
        return dtype, shape, ARENA, self.place(nbytes, itemsize), self.block()

    def place(self, nbytes: int, alignment: int) -> bytes:
        """Choose a position for a tensor; a wrong one now and then."""
        chooser = self._chooser
        segment = chooser.one_of(list(self.sizes))
        last = max(0, self.sizes[segment] - nbytes) // alignment
        offset = chooser.number(0, last) * alignment
        if chooser.happens(self._one_in):
            offset = chooser.one_of((self.sizes[segment], *BOUNDARIES)) % 2**64
        if chooser.happens(2 * self._one_in):
            segment = chooser.one_of(BOUNDARIES) % 2**64
        payload = WHERE.pack(segment, offset)
        return payload[: chooser.number(0, 15)] if chooser.happens(3 * self._one_in) else payload


def attributes(chooser: Chooser, one_in: int, dtype: str, dimensions: int) -> Frame:
    """Choose the attributes of a tensor: whether it requires a gradient and is a parameter, and its order."""
    may_require = DTYPES[dtype].is_floating_point or chooser.happens(one_in)
    order: list[Scalar] = [*range(dimensions)]
    if chooser.happens(2):
        order.reverse()
    if chooser.happens(one_in):
        order.append(boundary(chooser))
    return [may_require and chooser.number(0, 1) == 1, chooser.number(0, 1) == 1, order]


def with_trace(chooser: Chooser, one_in: int, frame: Frame, fields: int) -> Frame:
    """Add a trace context to a frame, in some cases.

    Args:
        chooser: decides.
        one_in: how seldom something is wrong.
        frame: the frame; fields before the trace context that it lacks are None.
        fields: the number of items before the trace context, with the tag.
    """
    if not chooser.happens(4):
        return frame
    trace: dict[Scalar, Scalar] = {"traceparent": _PARENT}
    if chooser.happens(2):
        trace["baggage"] = chooser.one_of(("", "user=1", "x" * MAX_TRACE_VALUE, "=,;"))
    if chooser.happens(one_in):
        trace["traceparent"] = chooser.one_of(("", "00--", None, 1, "x" * (MAX_TRACE_VALUE + 1)))
    if chooser.happens(one_in):
        trace["x" * (MAX_TRACE_NAME + chooser.number(0, 1))] = ""
    if chooser.happens(one_in):
        count = MAX_TRACE_FIELDS + chooser.number(0, 1)
        trace = {f"field-{number}": "" for number in range(count)}
    return [*frame, *[None] * (fields - len(frame)), trace]
