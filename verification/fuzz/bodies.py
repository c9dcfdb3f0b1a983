"""Nearly valid bodies of messages, with tensors inside them, beside them and tied to others."""

import math

from msgspec.msgpack import Ext, encode

from aiotensor.codec.placeholders import ARRAY, TENSOR
from aiotensor.memory.tensors import DTYPES
from verification.fuzz.placing import DTYPE_NAMES, attributes
from verification.fuzz.wire import Chooser, Frame, Scalar, boundary, bytes_or_fault, frame_or_fault


def message_parts(chooser: Chooser, one_in: int) -> list[bytes]:
    """Generate a body, and the buffers of the tensors beside it."""
    buffers: list[bytes] = []
    body = _body(chooser, one_in, chooser.number(0, 1), buffers)
    return [body, *buffers]


def body_of(chooser: Chooser, one_in: int, elsewhere: int) -> bytes:
    """Generate a body without buffers, which refers to `elsewhere` tensors by their numbers."""
    return _body(chooser, one_in, elsewhere, None)


def _body(chooser: Chooser, one_in: int, elsewhere: int, buffers: list[bytes] | None) -> bytes:
    records: list[Frame] = [["at", number, number] for number in range(elsewhere)]
    for _ in range(chooser.number(0, 3)):
        meaning, nbytes = _meaning(chooser, one_in)
        data = chooser.data(nbytes) if nbytes < 300 else bytes(nbytes)
        if buffers is not None and chooser.happens(2):
            buffers.append(data)
            records.append(["by", meaning, len(buffers) - 1, len(records)])
        else:
            records.append(["in", meaning, data, len(records)])
    if records and chooser.happens(4):
        records.append(["as", chooser.number(0, len(records))])
    tensors = [_tensor(chooser, one_in, record) for record in records]
    fields: dict[str, Scalar] = {"number": chooser.number(0, 9), "tensors": tensors}
    if chooser.happens(3):
        fields["array"] = Ext(ARRAY, encode(["in", ["uint8", [2]], b"ab", len(tensors)]))
    if chooser.happens(one_in):
        wrong: Scalar = chooser.one_of((None, [], {}, "text", boundary(chooser), tensors))
        fields[chooser.one_of(("number", "tensors", "array", "more"))] = wrong
    return bytes_or_fault(chooser, 2 * one_in, encode(fields))


def _tensor(chooser: Chooser, one_in: int, record: Frame) -> Ext:
    data = encode(frame_or_fault(chooser, one_in, record))
    code = chooser.one_of((TENSOR, ARRAY, 5, -1)) if chooser.happens(one_in) else TENSOR
    return Ext(code, bytes_or_fault(chooser, 2 * one_in, data))


def _meaning(chooser: Chooser, one_in: int) -> tuple[Frame, int]:
    dtype = chooser.one_of(DTYPE_NAMES)
    shape: list[Scalar] = [chooser.number(0, 4) for _ in range(chooser.number(0, 3))]
    nbytes = math.prod(size for size in shape if isinstance(size, int)) * DTYPES[dtype].itemsize
    if chooser.happens(one_in):
        shape = [boundary(chooser) for _ in range(chooser.number(1, 4))]
    meaning: Frame = [dtype, shape]
    if chooser.happens(4):
        meaning.append(attributes(chooser, one_in, dtype, len(shape)))
    return frame_or_fault(chooser, one_in, meaning), nbytes
