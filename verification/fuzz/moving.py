"""The moves of a rogue: steps of blocks in its segments, freed blocks, and acknowledgements."""

from aiotensor.protocol import network
from verification.fuzz.placing import Segments
from verification.fuzz.steps import HEARD
from verification.fuzz.wire import BOUNDARIES, Chooser, broken_bytes

_MISPLACED = (bytes([network.BYE]), network.OPENING, bytes([99]), b"")
_ALIGNED = 64
_MOST_BYTES = 4096


def any_opening(chooser: Chooser, one_in: int) -> str | None:
    """Return the first message of a connection in hexadecimal digits; None for the valid one, as mostly."""
    if not chooser.happens(4 * one_in):
        return None
    return chooser.one_of((broken_bytes(chooser, network.OPENING), bytes([network.RECORD]), b"")).hex()


class Movement:
    """The blocks of a rogue, from which its next message about moves is derived.

    A byte is moved to the position that it has in the image, so the byte of every tensor is known.
    """

    def __init__(self, chooser: Chooser, one_in: int, segments: Segments, image: bytes) -> None:
        self._chooser = chooser
        self._one_in = one_in
        self._segments = segments
        self._image = image
        self._blocks: dict[network.Area, int] = {}  # their sizes

    def whole(self, area: network.Area, nbytes: int) -> str:
        """Return the message that moves a whole block, in hexadecimal digits."""
        self._blocks[area] = nbytes
        step = network.Step(area, nbytes, area.block, nbytes, wants_ack=True)
        return (network.encode_step(step) + self._bytes(area.block, nbytes)).hex()

    def messages(self) -> tuple[str, ...]:
        """Return the messages before the next record, in hexadecimal digits; most connections ignore them."""
        chooser = self._chooser
        said: list[bytes] = []
        for _ in range(chooser.number(0, 3)):
            first, *others = self._right_messages()
            if chooser.happens(2 * self._one_in):
                # Of a step, only the end is cut off: otherwise, it could move other bytes than the image.
                is_step = first[0] == network.STEP
                broken = first[: chooser.number(0, len(first) - 1)]
                first = broken if is_step else broken_bytes(chooser, first).lstrip(bytes([network.STEP]))
            said += [first, *others]
            if chooser.happens(2 * self._one_in):
                said.append(chooser.one_of(_MISPLACED))
        said = [network.encode_batch(said)] if chooser.happens(4) else said
        return tuple(message.hex() for message in said)

    def _right_messages(self) -> list[bytes]:
        chooser, sizes, seldom = self._chooser, self._segments.sizes, 2 * self._one_in
        self._blocks = {area: nbytes for area, nbytes in self._blocks.items() if area.segment in sizes}
        kind = chooser.number(0, 5)
        if kind == 0 and (self._blocks or chooser.happens(self._one_in)):
            area = chooser.one_of([*self._blocks, network.Area(0, 0)])
            self._blocks.pop(area, None)
            return [network.encode_area(area)]
        if kind == 1 or (not sizes and not chooser.happens(self._one_in)):
            totals = [HEARD, HEARD]
            if chooser.happens(self._one_in):
                totals[chooser.number(0, 1)] = chooser.one_of(BOUNDARIES) % 2**64
            return [network.encode_ack(network.Ack(*totals))]
        area, nbytes = self._block()
        first = chooser.number(0, nbytes - 1)
        length = chooser.number(1, min(nbytes - first, _MOST_BYTES))
        if chooser.happens(seldom):
            length = chooser.one_of((0, network.STEP_BYTES, network.STEP_BYTES + 1, length + 1))
        start = area.block + first
        step = network.encode_step(network.Step(area, nbytes, start, length, chooser.happens(2)))
        data = self._bytes(start, length)[chooser.happens(seldom) :]
        return [step + data] if chooser.happens(2) else [step, data]

    def _bytes(self, start: int, length: int) -> bytes:
        return self._image[start : start + length].ljust(length, b"\0")

    def _block(self) -> tuple[network.Area, int]:
        """Return a block of an attached segment, an earlier one or a new one; a wrong one now and then."""
        chooser, sizes = self._chooser, self._segments.sizes
        if self._blocks and chooser.happens(2):
            return chooser.one_of(list(self._blocks.items()))
        number = chooser.one_of(list(sizes)) if sizes else 0
        size = sizes.get(number, _MOST_BYTES)
        before = [area.block + nbytes for area, nbytes in self._blocks.items() if area.segment == number]
        block = -(-max(before, default=0) // _ALIGNED) * _ALIGNED  # behind the others
        if chooser.happens(self._one_in):
            block = chooser.one_of((*BOUNDARIES, size, 1)) % 2**63
        nbytes = chooser.number(1, max(1, min(_MOST_BYTES, size - block)))
        if chooser.happens(self._one_in):
            nbytes = chooser.one_of((size, size + 1, *BOUNDARIES)) % 2**62 or 1
        self._blocks[network.Area(number, block)] = nbytes
        return network.Area(number, block), nbytes
