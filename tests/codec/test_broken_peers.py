"""Decoding a valid message with any change returns a message, or raises a ProtocolError."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.codec import TensorEncoder
from tests.codec.messages import Box, Crate, Labelled, arrays, sent, tensors
from tests.codec.scenes import DECODERS, Scene, read_or_refuse
from tests.memory.segments import random_tensor
from tests.selection import COMPLETE

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


flat_arrays = arrays().map(np.copy)  # a peer sees no strides
items = tensors() | flat_arrays | st.text(max_size=3)


@st.composite
def valid_parts(draw: st.DrawFn) -> list[bytearray]:
    scene = Scene(
        frames=draw(st.none() | st.just(random_tensor((5, 3), torch.float32))),
        mask=draw(st.none() | st.just(np.arange(9, dtype=np.uint8))),
        boxes=[Box(tensor) for tensor in draw(st.lists(tensors(), max_size=2))],
        crate=Crate(1, draw(items)) if draw(st.booleans()) else None,
        labelled={"a": Labelled("b", draw(flat_arrays))},
        rest=draw(st.lists(items | st.dictionaries(st.text(max_size=3), items, max_size=2), max_size=3)),
        below=Scene(options={"second": draw(tensors())}),
    )
    places = iter(draw(st.lists(st.sampled_from([None, 0, "there"]), max_size=4)))
    encoder = TensorEncoder(lambda _: next(places, None), inline_bytes=draw(st.sampled_from([0, 40, 8192])))
    return sent(encoder.encode(scene))


others = st.integers(1, 255)


def change_bytes(data: st.DataObject, part: bytearray) -> None:
    """Do to some bytes what a broken or hostile peer may do to them."""
    where = data.draw(st.integers(0, len(part)))
    what = data.draw(st.sampled_from(["flip", "change", "cut", "drop", "insert", "append"]))
    if what == "cut":
        del part[where:]
    elif what == "append":
        part += data.draw(st.binary(min_size=1, max_size=4))
    elif what == "insert":
        part[where:where] = data.draw(st.binary(min_size=1, max_size=4))
    elif what == "drop":
        del part[where : where + 1]
    elif where < len(part):
        part[where] ^= data.draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]) if what == "flip" else others)


def change_parts(data: st.DataObject, parts: list[bytearray]) -> None:
    """Do to the buffers what a broken or hostile peer may do to them."""
    what = data.draw(st.sampled_from(["drop", "add", "double", "order", "bytes"]))
    where = data.draw(st.integers(1, len(parts)))
    if what == "order":
        parts[1:] = data.draw(st.permutations(parts[1:]))
    elif what == "add":
        parts.insert(where, bytearray(data.draw(st.binary(max_size=20))))
    elif where < len(parts):
        if what == "drop":
            del parts[where]
        elif what == "double":
            parts.insert(where, parts[where])
        else:
            change_bytes(data, parts[where])


@settings(max_examples=300 if COMPLETE else 50)
@given(parts=valid_parts(), data=st.data())
def test_a_modified_message_is_decoded_or_raises_protocol_error(
    parts: list[bytearray], data: st.DataObject
) -> None:
    assert isinstance(DECODERS["of a Struct, with a find"].decode(sent(parts)), Scene), "it is valid"
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            change_bytes(data, parts[0])
        else:
            change_parts(data, parts)
        for decoder in DECODERS.values():
            read_or_refuse(decoder, sent(parts))
