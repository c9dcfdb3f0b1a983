"""Decoding a valid message with any change returns a message, or raises a ProtocolError."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.codec import TensorEncoder
from aiotensor.memory.tensors import DTYPES
from tests.codec.messages import Box, Crate, Labelled, arrays, body_of, extension, sent, tensors
from tests.codec.scenes import DECODERS, Scene, read_or_refuse
from tests.memory.segments import random_tensor
from tests.protocol.test_frames import unknown_items
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


@settings(max_examples=300 if COMPLETE else 60)
@given(body=st.binary(max_size=60), buffers=st.lists(st.binary(max_size=9), max_size=2))
def test_arbitrary_bytes_are_decoded_or_raise_protocol_error(body: bytes, buffers: list[bytes]) -> None:
    for decoder in DECODERS.values():
        read_or_refuse(decoder, [body, *buffers])


few = st.sampled_from([0, 1, 2, 3, 64, 2**31, 2**62, 2**63 - 1, 2**63, -1, True, None, 1.0])
meanings = (
    st.tuples(
        st.sampled_from([*DTYPES, "mystery", "", None]),
        st.lists(few, max_size=3) | st.just([1] * 65) | few,
        st.tuples(st.booleans(), st.booleans(), st.lists(few, max_size=3)) | st.none(),
    )
    | unknown_items
)
placeholders = st.one_of(
    st.tuples(st.just("in"), meanings, st.binary(max_size=16), few),
    st.tuples(st.just("by"), meanings, few, few),
    st.tuples(st.just("at"), unknown_items, few),
    st.tuples(st.just("as"), few),
    unknown_items,
)
extensions = st.builds(extension, st.sampled_from("TA"), placeholders) | st.builds(
    msgspec.msgpack.Ext, st.sampled_from([ord("T"), ord("A"), -1, 5]), st.binary(max_size=16)
)
wild = st.recursive(
    extensions | unknown_items,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(Scene.__struct_fields__), inner, max_size=3)
        | st.fixed_dictionaries({"item": inner, "number": st.just(1)})
    ),
    max_leaves=4,
)


@settings(max_examples=600 if COMPLETE else 60)
@given(message=wild, buffers=st.lists(st.binary(max_size=16), max_size=2))
def test_arbitrary_tensor_placeholders_are_decoded_or_raise_protocol_error(
    message: object, buffers: list[bytes]
) -> None:
    for decoder in DECODERS.values():
        read_or_refuse(decoder, [body_of(message), *buffers])
