"""Annotations of tensors are checked, and the error has the path and both descriptions."""

from typing import (
    Annotated,
    Any,
)

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import Parameter

from aiotensor.codec import TensorDecoder, TensorEncoder, TensorMeta
from aiotensor.errors import ProtocolError
from tests.codec.messages import Box, of, sent, tensors_in, through
from tests.codec.positions import (
    POSITIONS,
    REFUSED,
    BelowGeneric,
    Blurred,
    Diamond,
    Frames,
    Late,
    Movie,
    Moving,
    Node,
    Pixelated,
    Pixels,
    Still,
    Video,
)


def test_a_tensor_that_matches_its_annotation_is_accepted() -> None:
    for position, (type_, make, _) in POSITIONS.items():
        for count in (2, 0, 7000):
            source = torch.arange(count * 3).to(torch.uint8).reshape(count, 3)
            *_, last = tensors_in(through(type_, make(source)))
            assert np.array_equal(last, source), position


WRONG = {
    "float32 of shape (2, 3)": torch.zeros(2, 3),
    "uint8 of shape (2, 4)": torch.zeros(2, 4, dtype=torch.uint8),
    "uint8 of shape (3,)": torch.zeros(3, dtype=torch.uint8),
    "uint8 of shape (9000, 1, 3)": torch.zeros(9000, 1, 3, dtype=torch.uint8),
    "bool of shape ()": torch.tensor(True),
}


def test_the_error_of_a_mismatched_tensor_has_its_path_and_both_descriptions() -> None:
    for type_, make, path in POSITIONS.values():
        decoder: TensorDecoder[Any] = TensorDecoder(type_)
        for found, wrong in WRONG.items():
            with pytest.raises(ProtocolError) as caught:
                decoder.decode(sent(TensorEncoder().encode(make(wrong))))
            assert str(caught.value) == (
                f"`{path}` does not match its annotation: expected uint8 of shape (any, 3), found {found}"
            )


def test_the_error_describes_the_expected_tensor_as_annotated() -> None:
    for meta, expected in (
        (TensorMeta(dtype=torch.bfloat16), "bfloat16 of any shape"),
        (TensorMeta(shape=()), "any dtype of shape ()"),
        (TensorMeta(shape=(None, 0)), "any dtype of shape (any, 0)"),
        (TensorMeta(torch.int32, (2, None)), "int32 of shape (2, any)"),
    ):
        with pytest.raises(ProtocolError, match="does not match its annotation") as caught:
            through(Annotated[torch.Tensor, meta], torch.zeros(2, 2))
        assert f"expected {expected}, found float32 of shape (2, 2)" in str(caught.value)


def test_a_message_without_an_optional_tensor_is_accepted() -> None:
    assert through(Annotated[torch.Tensor | None, Pixels], None) is None
    assert through(Node, Node(below=Node())) == Node(below=Node())
    assert through(Late, Late()) == Late()


def test_each_of_a_union_is_checked_by_its_own_annotations() -> None:
    for type_, kind in ((Still | Moving, Moving), (Still | Blurred, Blurred)):
        received = through(type_, kind(torch.zeros(2)))
        assert type(received) is kind
        assert received.frames.tolist() == [0, 0]


def test_inherited_annotations_are_checked() -> None:
    decoder: TensorDecoder[Any] = TensorDecoder(BelowGeneric)
    decoder.decode(TensorEncoder().encode({"x": torch.zeros(3)}))
    with pytest.raises(
        ProtocolError, match=r"expected any dtype of shape \(3,\), found float32 of shape \(4,\)"
    ):
        decoder.decode(TensorEncoder().encode({"x": torch.zeros(4)}))


def test_annotations_follow_the_method_resolution_order() -> None:
    decoder: TensorDecoder[Any] = TensorDecoder(Diamond)
    assert decoder.decode(TensorEncoder().encode({"x": torch.zeros(4)})).x.shape == (4,)
    with pytest.raises(ProtocolError, match=r"expected any dtype of shape \(4,\)"):
        decoder.decode(TensorEncoder().encode({"x": torch.zeros(3)}))


# Valid annotations


class Named(torch.Tensor):
    """A subclass that the receiver cannot rebuild."""


class Plain:
    """A class that msgspec cannot decode."""


def test_an_annotation_that_cannot_be_checked_raises_type_error() -> None:
    metas: list[tuple[Any, str]] = [
        (Annotated[int, Pixels], "int"),
        (of(Box, Annotated[str | None, Pixels]), "str"),
        (Annotated[list[torch.Tensor], Pixels], "list"),
        (Annotated[Any, Pixels], "Any"),
        (of(Pixelated, int), "int"),
        (Annotated[Video, Pixels], "Video"),
    ]
    for type_, refused in metas:
        with pytest.raises(
            TypeError, match=rf"a TensorMeta describes a tensor, but .*{refused}.* is not a tensor"
        ):
            TensorDecoder(type_)
    for type_ in REFUSED.values():
        with pytest.raises(
            TypeError, match=r"contains a TensorMeta: it can annotate .* field of a msgspec\.Struct"
        ):
            TensorDecoder(type_)
    with pytest.raises(TypeError, match=r"use TensorMeta\(\.\.\.\) in an annotation"):
        TensorDecoder(of(Annotated, torch.Tensor, TensorMeta))
    with pytest.raises(TypeError, match=r"cannot be decoded: it contains a .*Plain"):
        TensorDecoder(list[Plain])
    kind: Any
    for kind in (torch.FloatTensor, Named, np.matrix):
        with pytest.raises(TypeError, match=rf"it contains a .*{kind.__name__}.*annotate a tensor as torch"):
            TensorDecoder(list[kind])


def test_a_meta_has_a_torch_dtype_and_a_shape_of_sizes() -> None:
    dtypes: list[Any] = [np.uint8, "uint8", np.dtype("u1"), int, 3]
    for dtype in dtypes:
        with pytest.raises(TypeError, match=r"such as torch\.uint8, got"):
            TensorMeta(dtype=dtype)
    shapes: list[Any] = [("3",), (1.0,), 3, 0, "", "33", (None, [1])]
    for shape in shapes:
        with pytest.raises(TypeError):
            TensorMeta(shape=shape)
    for shape in ((-1,), (None, 3, -3)):
        with pytest.raises(ValueError, match=r"sizes of a shape must not be negative, got \("):
            TensorMeta(shape=shape)


# Tensors and arrays


def test_tensors_and_arrays_are_converted_to_the_annotated_type() -> None:
    tensor, array = torch.arange(6.0).reshape(2, 3), np.arange(6, dtype=np.uint16).reshape(3, 2)
    for inline_bytes in (1 << 20, 0):
        parts = TensorEncoder(inline_bytes=inline_bytes).encode({"a": [tensor, array]})
        tensors = TensorDecoder(dict[str, list[torch.Tensor]]).decode(sent(parts))["a"]
        arrays = TensorDecoder(dict[str, list[np.ndarray[Any, Any]]]).decode(sent(parts))["a"]
        as_sent = TensorDecoder(dict[str, list[Any]]).decode(sent(parts))["a"]

        assert [type(item) for item in tensors] == [torch.Tensor, torch.Tensor]
        assert [type(item) for item in arrays] == [np.ndarray, np.ndarray]
        assert [type(item) for item in as_sent] == [torch.Tensor, np.ndarray]
        assert [item.dtype for item in tensors] == [torch.float32, torch.uint16]
        for received in (tensors, arrays, as_sent):
            assert np.array_equal(received[0], tensor)
            assert np.array_equal(received[1], array)


def test_a_tensor_that_requires_a_gradient_can_be_decoded_as_an_array() -> None:
    assert through(np.ndarray, torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_a_dtype_unknown_to_numpy_cannot_be_decoded_as_an_array() -> None:
    with pytest.raises(ProtocolError, match=r"array of torch\.bfloat16, which numpy does not support"):
        through(list[np.ndarray[Any, Any]], [torch.zeros(2, dtype=torch.bfloat16)])


def test_a_parameter_is_accepted_as_a_tensor_but_not_the_reverse() -> None:
    assert type(through(torch.Tensor, Parameter(torch.zeros(1)))) is Parameter
    with pytest.raises(ProtocolError, match=r"Expected `Parameter`, got `Tensor` - at `\$\.item`"):
        through(of(Box, Parameter), Box(torch.zeros(1)))


NUMPY_TYPES: dict[str, tuple[Any, list[str], list[str]]] = {
    "no dtype": (np.ndarray, ["u1", "f8", "?"], []),
    "one dtype": (npt.NDArray[np.uint8], ["u1"], ["i1", "f4", "?"]),
    "a kind of numbers": (npt.NDArray[np.floating[Any]], ["f2", "f8"], ["u1", "c8"]),
    "any kind": (npt.NDArray[np.generic], ["u1", "f8", "?"], []),
    "anything": (npt.NDArray[Any], ["u1", "f8", "?"], []),
    "two dtypes": (npt.NDArray[np.uint8 | np.float32], ["u1", "f4"], ["i1", "f8"]),
    "spelled out": (np.ndarray[tuple[int, ...], np.dtype[np.int64]], ["i8"], ["i4"]),
    "an optional": (npt.NDArray[np.uint8] | None, ["u1"], ["i1"]),
}


def test_the_annotated_dtype_of_an_array_is_checked() -> None:
    for type_, right, wrong in NUMPY_TYPES.values():
        for dtype in [*right, *wrong]:
            source = np.ones((2, 2), dtype)
            for sent_as in (source, torch.from_numpy(source)):
                if dtype in right:
                    assert through(of(list, type_), [sent_as])[0].dtype == source.dtype
                    continue
                with pytest.raises(ProtocolError, match=rf"got `{source.dtype}` - at `\$\[0\]`"):
                    through(of(list, type_), [sent_as])


# Any other type


OTHERS: dict[str, tuple[Any, object]] = {
    "Expected `Tensor`, got `int`": (torch.Tensor, 3),
    "Expected `Tensor`, got `NoneType`": (torch.Tensor, None),
    "Expected `Tensor`, got `list`": (torch.Tensor, [1.0]),
    "Expected `Tensor`, got `dict`": (Frames | None, {}),
    "Expected `numpy.ndarray`, got `str`": (np.ndarray, "text"),
    "Expected `numpy.ndarray`, got `bytes` - at `$[0]`": (list[npt.NDArray[np.uint8]], [b"bytes"]),
    "Expected `Tensor`, got `int` - at `$.video.frames`": (Movie, {"video": {"frames": 3}}),
    "missing required field `frames` - at `$.video`": (Movie, {"video": {}}),
    "Expected `int`, got a tensor or an array - at `$.item`": (Box[int], Box(torch.zeros(1))),
    "Expected `str`, got a tensor or an array - at `$.item`": (Box[str], Box(np.zeros(9000))),
    "Expected a Struct, a dataclass or a dict, got a tensor or an array - at `$[0]`": (
        list[Box[int]],
        [torch.zeros(1)],
    ),
    "Invalid value 'Other' - at `$.type`": (Still | Moving, {"type": "Other", "frames": 1}),
    "Expected `array` of length 2, got 1": (tuple[torch.Tensor, torch.Tensor], [torch.zeros(1)]),
}


def test_the_error_of_a_value_of_the_wrong_type_has_its_path() -> None:
    for text, (type_, message) in OTHERS.items():
        with pytest.raises(ProtocolError) as caught:
            through(type_, message)
        assert str(caught.value).endswith(text)


def test_the_error_of_a_union_with_a_tensor_suggests_any() -> None:
    unions: list[Any] = [
        torch.Tensor | np.ndarray,
        torch.Tensor | float,
        list[torch.Tensor] | torch.Tensor,
        of(Box, list[torch.Tensor] | torch.Tensor | None),
    ]
    for type_ in unions:
        with pytest.raises(
            TypeError, match="annotate the field as `Any`, which accepts tensors, arrays, and con"
        ):
            TensorDecoder(type_)


def test_unknown_fields_are_ignored_unless_they_use_a_buffer() -> None:
    decoder = TensorDecoder(Box[int])

    assert decoder.decode(TensorEncoder().encode({"item": 1, "small": torch.zeros(3)})) == Box(1)
    with pytest.raises(
        ProtocolError, match="a tensor is in a field that the type of this decoder does not have"
    ):
        decoder.decode(TensorEncoder().encode({"item": 1, "large": torch.zeros(9000)}))
