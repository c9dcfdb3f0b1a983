"""Decoding any data returns a message or raises a ProtocolError; encoding rejects invalid values."""

from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aiotensor.codec import TensorDecoder, TensorEncoder
from aiotensor.errors import ProtocolError, UnsupportedTensorError
from tests.codec.messages import Box, anything, beside, body_of, extension, inside, of, sent
from tests.codec.scenes import DECODERS, every_decoder, read_or_refuse
from tests.selection import COMPLETE, DTYPES
from tests.test_values import REFUSED

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_an_invalid_tensor_placeholder_raises_protocol_error() -> None:
    for tensor in (
        inside("float31", [1], b"1234"),
        inside("__class__", [1], b"1234"),
        inside("u" * 65, [1], b"1"),
        inside("qint8", [1], b"1"),
        inside("uint8", [2], b"1"),
        inside("uint8", [2], b"123"),
        inside("uint8", [0], b"1"),
        inside("uint8", [], b""),
        inside("float64", [2**60], b""),
        inside("uint8", [2**63 - 1] * 64, b""),
        inside("uint8", [2**63], b""),
        inside("uint8", [2**63 - 1, 2], b""),
        inside("uint8", [2**64 - 1, 2**63], b""),
        inside("uint8", [0, 2**62, 2], b""),
        inside("float64", [0, 2**60], b""),
        inside("uint8", [-1], b""),
        inside("uint8", [-1, -1], b"1"),
        inside("uint8", [1] * 65, b"1"),
        inside("uint8", [1.0], b"1"),
        inside("uint8", [True], b"1"),
        inside("uint8", None, b"1"),
        inside("uint8", 1, b"1"),
        inside("uint8", [1], "1"),
        inside("uint8", [1], None),
        inside("uint8", [1], b"1", True),
        inside("uint8", [1], b"1", 1),
        inside("uint8", [1], b"1", None, None),
        inside("float32", [1], b"1234", 1),
        inside("float32", [1], b"1234", True, 1),
        extension("T", ["in", ["uint8"], b"1", 0]),
        extension("T", ["in", [8, [1]], b"1", 0]),
        extension("T", ["in"]),
        extension("T", ["of"]),
        extension("T", []),
        extension("T", None),
        extension("T", ["by", ["uint8", [3]]]),
        extension("T", ["by", ["uint8", [3]], 0.0, 0]),
        extension("T", ["at"]),
        extension("T", ["at", "handle", 0]),
        extension("A", ["at", {"a": msgspec.msgpack.Ext(84, b"")}, 0]),
        extension("A", ["in", ["bfloat16", [1]], b"12", 0]),
        extension("A", ["in", ["int4", [1]], b"1", 0]),
        msgspec.msgpack.Ext(ord("T"), b""),
        msgspec.msgpack.Ext(ord("A"), b"\xc1"),
        msgspec.msgpack.Ext(ord("T"), b"\x92\xa2at\xa1\xff"),
        msgspec.msgpack.Ext(ord("T"), b"\x92\xa2at\xdd\xff\xff\xff\xff"),
        msgspec.msgpack.Ext(ord("T"), b"\x92\xa2at\x81\x80\x01"),
        msgspec.msgpack.Ext(ord("T"), b"\x92\xa2at\xc0\xc0"),
        msgspec.msgpack.Ext(ord("T"), b"\x92\xa2\xff\xff\xc0"),
    ):
        for which, message in (
            ("of anything", tensor),
            ("of anything", {"rest": [tensor]}),
            ("of a Struct", {"boxes": [{"item": tensor}]}),
        ):
            with pytest.raises(ProtocolError):
                print(tensor, DECODERS[which].decode([body_of(message)]))


def test_a_tensor_of_64_dimensions_is_decoded() -> None:
    most = extension("T", ["in", ["float32", [1] * 64], b"1234", 0])
    assert anything.decode([body_of(most)]).ndim == 64


def test_only_float_and_complex_tensors_may_require_a_gradient() -> None:
    for (name, dtype), code, flags in product(
        DTYPES.items(), "TA", [(True, False), (True, True), (False, True)]
    ):
        for shape in ([2], [0], []):
            data = bytes(dtype.itemsize * (shape[0] if shape else 1))
            for placeholder, buffers in (
                (["in", [name, shape, flags], data, 0], []),
                (["by", [name, shape, flags], 0, 0], [data]),
            ):
                parts = [body_of(extension(code, placeholder)), *buffers]
                if flags[0] and not (dtype.is_floating_point or dtype.is_complex):
                    with pytest.raises(ProtocolError, match="requires a gradient"):
                        anything.decode(parts)
                elif code == "T":
                    assert anything.decode(parts).requires_grad is flags[0]
                else:
                    read_or_refuse(anything, parts)


ONE = b"abc"  # as many bytes as `beside` makes of a tensor


def test_mismatched_buffers_raise_protocol_error() -> None:
    mismatches: list[tuple[object, list[bytes], str]] = [
        (beside(0), [], "referred to buffer 0, but sent 0"),
        ([beside(0), beside(1)], [ONE], "referred to buffer 1, but sent 1"),
        (beside(2**63 - 1), [ONE], "referred to buffer 9223372036854775807, but sent 1"),
        (beside(2**63), [ONE], "an invalid tensor: "),
        (beside(-1), [ONE], "an invalid tensor: "),
        (beside(None), [ONE], "an invalid tensor: "),
        ([beside(0), beside(0)], [ONE, ONE], "referred to buffer 0 twice"),
        ([], [ONE], "sent 1 buffers, but the message uses 0 of them"),
        (beside(0), [ONE, b""], "sent 2 buffers, but the message uses 1 of them"),
        (beside(1), [ONE, ONE], "sent 2 buffers, but the message uses 1 of them"),
        (beside(0), [b"ab"], "sent 2 bytes .* which needs 3"),
        (beside(0), [b"abcd"], "sent 4 bytes .* which needs 3"),
        (beside(0, "uint8", [0]), [ONE], "sent 3 bytes .* which needs 0"),
        (beside(0, "uint8", [0, 2**62, 2]), [b""], "more than can be addressed"),
        (beside(0, "float32", [2**62, 3]), [ONE], "sent 3 bytes"),
        (beside(0, "mystery"), [ONE], "unknown dtype 'mystery'"),
    ]
    for message, buffers, reason in mismatches:
        for given_as in (buffers, sent([*buffers])):
            with pytest.raises(ProtocolError, match=reason):
                anything.decode([body_of(message), *given_as])


def test_buffers_may_be_empty_and_in_any_order() -> None:
    received = anything.decode([body_of([beside(1), beside(0)]), b"abc", b"xyz"])

    assert [bytes(tensor.numpy()) for tensor in received] == [b"xyz", b"abc"]
    assert anything.decode([body_of(beside(0, "float32", [0, 3])), b""]).shape == (0, 3)


@every_decoder
def test_a_body_that_is_garbage_is_refused(which: str) -> None:
    for body in (
        b"",
        b"\xc1",
        b"garbage",
        b"\xc0\xc0",
        b"\xa1\xff",
        b"\xd9",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xffT",
        b"\xc7\x00",
        b"\x81\x80\x01",
        b"\x81\x91\x80\x01",
        b"\xd4\xff\x00",
        b"\xd7\xff" + b"\xff" * 8,
        b"\x81" + body_of(extension("A", ["in", ["uint8", [1]], b"1", 0])) + b"\x01",
    ):
        with pytest.raises(ProtocolError):
            DECODERS[which].decode([body])
    with pytest.raises(ProtocolError, match="without parts"):
        DECODERS[which].decode([])


# Around the recursion limits of msgspec and of the checks, which differ.
DEPTHS = [10, 200, 330, *(range(400, 1200, 25) if COMPLETE else (400, 500, 600, 1000, 1100)), 3_000, 100_000]


@every_decoder
def test_a_message_of_any_depth_is_read_or_refused(which: str) -> None:
    for opening in (b"\x91", b"\x81", b"\x81\xa4rest", b"\x81\xa5below", b"\x81\xa5boxes\x91"):
        for depth in DEPTHS:
            for end in (b"\xc0", b"\x80", b"\x90", b"\x01") if COMPLETE else (b"\xc0", b"\x90"):
                read_or_refuse(DECODERS[which], [opening * depth + end])
    for depth in DEPTHS:
        handle = msgspec.msgpack.Ext(ord("T"), b"\x92\xa2at" + b"\x91" * depth + b"\xc0")
        read_or_refuse(DECODERS[which], [body_of({"rest": handle})])


def test_items_that_a_set_cannot_contain_raise_protocol_error() -> None:
    array = extension("A", ["in", ["uint8", [1]], b"1", 0])
    types: list[Any] = [set[Any], frozenset[Any], set]
    for type_, item in product(types, ({}, [{}], array, msgspec.msgpack.Ext(5, b"theirs"))):
        for decoder, message in (
            (TensorDecoder(type_), [item]),
            (TensorDecoder(of(dict, str, type_)), {"a": [item]}),
        ):
            with pytest.raises(ProtocolError):
                decoder.decode([body_of(message)])


def test_an_error_does_not_repeat_long_data_of_a_peer() -> None:
    handle = extension("T", ["at", "x" * 100_000, 0])
    for message in (handle, inside("u" * 100_000, [1], b""), inside("uint8", [1], b"1" * 100_000)):
        with pytest.raises(ProtocolError) as caught:
            anything.decode([body_of(message)])
        assert len(str(caught.value)) < 300


# Values that cannot be encoded


def test_encoding_an_unsupported_tensor_raises_an_error_with_a_remedy() -> None:
    for make, remedy in REFUSED.values():
        for message in ([make()], {"a": [Box(make())]}):
            with pytest.raises(UnsupportedTensorError, match=remedy):
                TensorEncoder().encode(message)


def test_encoding_an_unsupported_object_raises_type_error() -> None:
    for value in (
        object(),
        1j,
        np.longdouble(1),
        np.complex64(1),
        np.datetime64(1, "s"),
        range(3),
        torch.uint8,
        int,
        iter([]),
    ):
        for message in (value, {"a": [Box(value)]}):
            with pytest.raises(
                TypeError, match=f"a message cannot contain a {type(value).__name__!r}"
            ) as caught:
                TensorEncoder().encode(message)
            assert not isinstance(caught.value, UnsupportedTensorError)
