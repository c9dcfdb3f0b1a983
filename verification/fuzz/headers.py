"""Nearly valid requests and replies, with their messages and tensors."""

import math

import msgspec

from aiotensor.codec.placeholders import ARRAY, LENGTH_BYTES, PACKED, TENSOR
from aiotensor.memory.dtypes import DTYPES
from aiotensor.protocol.exchange import VERSION
from verification.fuzz.choosers import WILDNESS, Chooser, happens, one_of
from verification.fuzz.placing import DTYPE_NAMES, attributes, with_trace
from verification.fuzz.steps import STAND_IN, Step
from verification.fuzz.wire import Frame, Scalar, boundary, broken_bytes, bytes_or_fault, frame_or_fault

TO_SERVER = "server"
TO_CLIENT = "client"

# The number of tensors in each message that the rogue's own sender has sent; each has 3 elements.
SENT_BEFORE = (1, 2, 1)

_encode = msgspec.msgpack.encode


class _Words:
    """A generator of the headers, bodies and buffers of one side."""

    def __init__(self, chooser: Chooser, one_in: int) -> None:
        self._chooser = chooser
        self._one_in = one_in
        self._next = 0

    def hello(self, tag: str) -> list[bytes]:
        chooser = self._chooser
        frame: Frame = [tag, VERSION, 1]
        if tag == "client":
            frame.append(one_of(chooser, ("", STAND_IN)))
            frame += [self._limit(), self._limit()] if happens(chooser, 4) else []
        elif happens(chooser, 4):
            frame += ["", one_of(chooser, (64, 1)), 1 << 20, self._limit(), self._limit()]
        return [self._header(frame)]

    def _limit(self) -> Scalar:
        chooser = self._chooser
        is_wrong = happens(chooser, self._one_in)
        return boundary(chooser) if is_wrong else one_of(chooser, (None, 1 << 24, 100, 1))

    def ask(self) -> list[bytes]:
        handles = self._handles()
        body, *buffers = self.message(len(handles))
        number, self._next = self._next, self._next + 1
        wants = not happens(self._chooser, 4)
        ask = with_trace(self._chooser, self._one_in, ["ask", number, body, handles, wants], 5)
        return self._parts(self._with_body(ask, buffers))

    def cancel(self) -> list[bytes]:
        return [self._header(["cancel", self._chooser.number(0, max(0, self._next - 1))])]

    def answer(self) -> list[bytes]:
        handles = self._handles()
        body, *buffers = self.message(len(handles))
        number = self._chooser.number(0, 3)
        return self._parts(self._with_body(["answer", number, body, handles], buffers))

    def failure(self) -> list[bytes]:
        text = one_of(self._chooser, ("a reason", "", "x" * 16_384, "x" * 16_385))
        return [self._header(["failure", self._chooser.number(0, 3), "ValueError", text])]

    def close(self) -> list[bytes]:
        return [self._header(["close", one_of(self._chooser, ("", "no room")), happens(self._chooser, 2)])]

    def message(self, elsewhere: int, *, has_buffers: bool = True) -> list[bytes]:
        """Generate a body and its buffers; the body refers to `elsewhere` tensors by their numbers."""
        chooser = self._chooser
        buffers: list[bytes] = []
        pack = bytearray()
        tensors = [self._tensor(["at", number, number]) for number in range(elsewhere)]
        for _ in range(chooser.number(0, 3)):
            meaning, nbytes = self._meaning()
            data = chooser.data(nbytes) if nbytes < 300 else bytes(nbytes)
            record: Frame = ["in", meaning, data, len(tensors)]
            if has_buffers and happens(chooser, 2):
                buffers.append(data)
                record = ["by", meaning, len(buffers) - 1, len(tensors)]
            elif has_buffers and happens(chooser, 3):
                packed = _encode(record)
                pack += len(packed).to_bytes(LENGTH_BYTES, "big") + packed
                tensors.append(msgspec.msgpack.Ext(TENSOR, PACKED))
                continue
            tensors.append(self._tensor(record))
        if tensors and happens(chooser, 4):
            tensors.append(self._tensor(["as", chooser.number(0, len(tensors))]))
        fields: dict[str, Scalar] = {"number": chooser.number(0, 9), "tensors": tensors}
        if happens(chooser, 3):
            fields["array"] = msgspec.msgpack.Ext(ARRAY, _encode(["in", ["uint8", [2]], b"ab", len(tensors)]))
        if happens(chooser, self._one_in):
            wrong: Scalar = one_of(chooser, (None, [], {}, "text", boundary(chooser), tensors))
            fields[one_of(chooser, ("number", "tensors", "array", "more"))] = wrong
        if pack:
            buffers.append(bytes_or_fault(chooser, self._one_in, bytes(pack)))
        return [bytes_or_fault(chooser, 2 * self._one_in, _encode(fields)), *buffers]

    def _tensor(self, record: Frame) -> msgspec.msgpack.Ext:
        chooser = self._chooser
        data = _encode(frame_or_fault(chooser, self._one_in, record))
        code = one_of(chooser, (TENSOR, ARRAY, 5, -1)) if happens(chooser, self._one_in) else TENSOR
        return msgspec.msgpack.Ext(code, bytes_or_fault(chooser, 2 * self._one_in, data))

    def _meaning(self) -> tuple[Frame, int]:
        chooser = self._chooser
        dtype = one_of(chooser, DTYPE_NAMES)
        shape: list[Scalar] = [chooser.number(0, 4) for _ in range(chooser.number(0, 3))]
        nbytes = math.prod(size for size in shape if isinstance(size, int)) * DTYPES[dtype].itemsize
        if happens(chooser, self._one_in):
            shape = [boundary(chooser) for _ in range(chooser.number(1, 4))]
        meaning: Frame = [dtype, shape]
        if happens(chooser, 4):
            meaning.append(attributes(chooser, self._one_in, dtype, len(shape)))
        return frame_or_fault(chooser, self._one_in, meaning), nbytes

    def _handles(self) -> list[Scalar]:
        chooser = self._chooser
        if not happens(chooser, 3):
            return []
        message = chooser.number(0, len(SENT_BEFORE) - 1)
        handles = [_handle(message, tensor) for tensor in range(SENT_BEFORE[message])]
        while happens(chooser, self._one_in):
            field = one_of(chooser, ("sender", "message", "tensor", "dtype", "shape", "device"))
            wrong = one_of(chooser, ("f" * 32, "", 7, -1, boundary(chooser), [1], None))
            handles.append({**_handle(message, 0), field: wrong})
        return [*handles]

    def _with_body(self, frame: Frame, buffers: list[bytes]) -> list[bytes]:
        """Return the parts of a message, with the body in the header or as a separate part."""
        body = frame[2]
        if not isinstance(body, bytes) or not happens(self._chooser, 4):
            return [self._header(frame), *buffers]
        frame[2] = None
        return [self._header(frame), body, *buffers]

    def _header(self, frame: Frame) -> bytes:
        header = _encode(frame_or_fault(self._chooser, self._one_in, frame))
        return bytes_or_fault(self._chooser, 2 * self._one_in, header)

    def _parts(self, parts: list[bytes]) -> list[bytes]:
        """Remove a part, or add one."""
        chooser = self._chooser
        if happens(chooser, 2 * self._one_in):
            parts.insert(chooser.number(0, len(parts)), one_of(chooser, (b"", b"\xc0", bytes(70_000))))
        if happens(chooser, 2 * self._one_in) and len(parts) > 1:
            del parts[chooser.number(0, len(parts) - 1)]
        if happens(chooser, 2 * self._one_in):
            where = chooser.number(0, len(parts) - 1)
            parts[where] = broken_bytes(chooser, parts[where])
        return parts


def _handle(message: int, tensor: int) -> dict[str, Scalar]:
    what = {"dtype": "int64", "shape": [3], "device": "cpu"}
    return {"sender": STAND_IN, "message": message, "tensor": tensor, **what}


def message_parts(chooser: Chooser) -> list[bytes]:
    """Generate a message without a header: its body and its buffers."""
    return _Words(chooser, one_of(chooser, WILDNESS)).message(chooser.number(0, 1))


def body_of(chooser: Chooser, one_in: int, elsewhere: int) -> bytes:
    """Generate a body without buffers, which refers to `elsewhere` tensors by their numbers."""
    return _Words(chooser, one_in).message(elsewhere, has_buffers=False)[0]


def to_server(chooser: Chooser) -> list[Step]:
    """Generate requests to a server."""
    one_in = one_of(chooser, WILDNESS)
    words = _Words(chooser, one_in)
    steps: list[Step] = []
    if not happens(chooser, 20):
        steps.append(_step(words.hello("client")))
    for _ in range(chooser.number(1, 8)):
        if happens(chooser, 20):
            words = _Words(chooser, one_in)
            steps.append(_step(words.hello("client"), connects=True))
        kind = chooser.number(0, 12)
        said = words.cancel() if kind > 9 else words.hello("client") if kind == 9 else words.ask()
        steps.append(_step(said, after=chooser.number(0, 1)))
    return steps


def to_client(chooser: Chooser) -> list[Step]:
    """Generate replies to a client, whose requests are numbered from 0."""
    words = _Words(chooser, one_of(chooser, WILDNESS))
    steps: list[Step] = []
    if not happens(chooser, 10):
        steps.append(_step(words.hello("server")))
    for _ in range(chooser.number(0, 6)):
        kind = one_of(chooser, (*["answer"] * 8, "failure", "failure", "close", "server"))
        said = words.hello(kind) if kind == "server" else getattr(words, kind)()
        # By then the client has sent requests, so that a reply can be valid.
        steps.append(_step(said, after=3 - chooser.number(0, 3)))
        if happens(chooser, 6):
            steps.append(_step(said))  # a duplicate
    return steps


def _step(parts: list[bytes], *, connects: bool = False, after: int = 0) -> Step:
    record, *others = parts
    return Step(record.hex(), connects=connects, after=after, parts=tuple(part.hex() for part in others))
