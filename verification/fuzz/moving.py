"""The moves of a rogue: steps of blocks in its segments, freed blocks, and acknowledgements."""

from aiotensor.errors import ProtocolError
from aiotensor.protocol import network
from verification.fuzz.choosers import Chooser, happens, one_of
from verification.fuzz.placing import Segments
from verification.fuzz.steps import HEARD
from verification.fuzz.things import GUARD
from verification.fuzz.wire import BOUNDARIES, broken_bytes

__all__ = ["Movement", "any_opening"]

_CARRIED = network.encode_data(b"\x90")  # only a rank receives the bytes of a tensor with a record
_MISPLACED = (
    bytes([network.BYE]),
    network.OPENING,
    bytes([99]),
    b"",
    _CARRIED,
    _CARRIED + b"carried",
    _CARRIED[:7],
)

_ALIGNED = 64
_MOST_BYTES = 4096


def any_opening(chooser: Chooser, one_in: int) -> str | None:
    """Return the first message of a connection in hexadecimal digits; None for the valid one, as mostly."""
    if not happens(chooser, 4 * one_in):
        return None
    return one_of(chooser, (broken_bytes(chooser, network.OPENING), bytes([network.RECORD]), b"")).hex()


class Movement:
    """The blocks of a rogue, from which its next valid message about moves is derived.

    A byte is moved to the position that it has in the image, so the byte of every tensor is known.
    """

    def __init__(self, chooser: Chooser, one_in: int, segments: Segments, image: bytes = GUARD) -> None:
        self._chooser = chooser
        self._one_in = one_in
        self._segments = segments
        self._image = image
        self._blocks: dict[network.Area, int] = {}  # their sizes

    def begin(self) -> None:
        """Forget the blocks of an earlier connection."""
        self._blocks.clear()

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
            messages = self._right_messages()
            if happens(chooser, 2 * self._one_in):
                broken = broken_bytes(chooser, messages[0])
                if not self._moves_other_bytes(broken, *messages[1:]):
                    messages[0] = broken
            if happens(chooser, 2 * self._one_in):
                messages.append(one_of(chooser, _MISPLACED))
            said += messages
        said = [network.encode_batch(said)] if happens(chooser, 4) else said
        return tuple(message.hex() for message in said)

    def _right_messages(self) -> list[bytes]:
        chooser = self._chooser
        sizes = self._segments.sizes
        self._blocks = {area: nbytes for area, nbytes in self._blocks.items() if area.segment in sizes}
        kind = chooser.number(0, 5)
        if kind == 0 and self._blocks:
            area = one_of(chooser, list(self._blocks))
            del self._blocks[area]
            return [network.encode_area(area)]
        if kind == 0 and happens(chooser, self._one_in):
            return [network.encode_area(network.Area(0, 0))]
        if kind == 1 or (not sizes and not happens(chooser, self._one_in)):
            totals = [HEARD, HEARD]
            if happens(chooser, self._one_in):
                totals[chooser.number(0, 1)] = one_of(chooser, BOUNDARIES) % 2**64
            return [network.encode_ack(network.Ack(*totals))]
        area, nbytes = self._block()
        first = chooser.number(0, nbytes - 1)
        length = chooser.number(1, min(nbytes - first, _MOST_BYTES))
        if happens(chooser, 2 * self._one_in):
            length = one_of(chooser, (0, network.STEP_BYTES, network.STEP_BYTES + 1, length + 1))
        start = area.block + first
        step = network.Step(area, nbytes, start, length, happens(chooser, 2))
        data = self._bytes(start, length)
        if happens(chooser, 2 * self._one_in):
            data = data[1:]
        return (
            [network.encode_step(step) + data] if happens(chooser, 2) else [network.encode_step(step), data]
        )

    def _bytes(self, start: int, length: int) -> bytes:
        return self._image[start : start + length].ljust(length, b"\0")

    def _moves_other_bytes(self, broken: bytes, *following: bytes) -> bool:
        """Return whether a message with a fault is a valid step, but not of the bytes at its position."""
        if broken[:1] != bytes([network.STEP]):
            return False
        try:
            step, data = network.read_step(broken)
        except ProtocolError:
            return False
        moved = bytes(data) or b"".join(following)
        return len(moved) == step.length and moved != self._bytes(step.start, step.length)

    def _block(self) -> tuple[network.Area, int]:
        """Return a block of an attached segment, an earlier one or a new one; a wrong one now and then."""
        chooser, sizes = self._chooser, self._segments.sizes
        if self._blocks and happens(chooser, 2):
            area = one_of(chooser, list(self._blocks))
            return area, self._blocks[area]
        number = one_of(chooser, list(sizes)) if sizes else 0
        size = sizes.get(number, _MOST_BYTES)
        before = [area.block + nbytes for area, nbytes in self._blocks.items() if area.segment == number]
        block = -(-max(before, default=0) // _ALIGNED) * _ALIGNED  # behind the others
        if happens(chooser, self._one_in):
            block = one_of(chooser, (*BOUNDARIES, size, 1)) % 2**63
        nbytes = chooser.number(1, max(1, min(_MOST_BYTES, size - block)))
        if happens(chooser, self._one_in):
            nbytes = one_of(chooser, (size, size + 1, *BOUNDARIES)) % 2**62 or 1
        area = network.Area(number, block)
        self._blocks[area] = nbytes
        return area, nbytes
