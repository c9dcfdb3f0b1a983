"""Annotations of tensors are checked, and the error has the path and both descriptions."""

from typing import (
    Annotated,
    Any,
)

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import Parameter

from aiotensor.codec import TensorDecoder, TensorEncoder, TensorMeta
from aiotensor.errors import ProtocolError
from tests.codec.families import (
    BelowGeneric,
    BelowGenericData,
    BelowGenericDict,
    BelowPoint,
    Diamond,
    DiamondData,
    Mixed,
    MixedData,
    MorePoint,
    TwoBelowGeneric,
)
from tests.codec.messages import Box, address_of, of, sent, tensors_in, through
from tests.codec.positions import (
    POSITIONS,
    Blurred,
    Frames,
    Late,
    Movie,
    Moving,
    Node,
    Pixelated,
    Pixels,
    Settings,
    Shared,
    Still,
    Video,
)

positions = pytest.mark.parametrize("position", POSITIONS)


@positions
def test_a_tensor_that_is_as_its_annotation_says_is_taken(position: str) -> None:
    type_, make, _ = POSITIONS[position]
    for count in (2, 0, 7000):
        source = torch.arange(count * 3).to(torch.uint8).reshape(count, 3)
        received = through(type_, make(source))

        *_, last = tensors_in(received if not isinstance(received, set) else [*received])
        assert np.array_equal(last, source)


WRONG = {
    "float32 of shape (2, 3)": torch.zeros(2, 3),
    "uint8 of shape (2, 4)": torch.zeros(2, 4, dtype=torch.uint8),
    "uint8 of shape (3,)": torch.zeros(3, dtype=torch.uint8),
    "uint8 of shape (9000, 1, 3)": torch.zeros(9000, 1, 3, dtype=torch.uint8),
    "bool of shape ()": torch.tensor(True),
}


@positions
def test_another_tensor_is_refused_with_its_place_and_what_was_expected_and_found(position: str) -> None:
    type_, make, path = POSITIONS[position]
    decoder: TensorDecoder[Any] = TensorDecoder(type_)
    for found, wrong in WRONG.items():
        with pytest.raises(ProtocolError) as caught:
            decoder.decode(sent(TensorEncoder().encode(make(wrong))))
        assert str(caught.value) == (
            f"`{path}` is not as its annotation says: expected uint8 of shape (any, 3), found {found}"
        )


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        (TensorMeta(dtype=torch.bfloat16), "bfloat16 of any shape"),
        (TensorMeta(shape=()), "any dtype of shape ()"),
        (TensorMeta(shape=(3,)), "any dtype of shape (3,)"),
        (TensorMeta(shape=(None, 0)), "any dtype of shape (any, 0)"),
        (TensorMeta(torch.int32, (2, None)), "int32 of shape (2, any)"),
    ],
    ids=str,
)
def test_what_was_expected_is_told_as_it_was_stated(meta: TensorMeta, expected: str) -> None:
    with pytest.raises(ProtocolError, match="as its annotation says") as caught:
        through(Annotated[torch.Tensor, meta], torch.zeros(2, 2))

    assert f"expected {expected}, found float32 of shape (2, 2)" in str(caught.value)


def test_a_meta_that_states_nothing_takes_every_tensor() -> None:
    for source in (torch.zeros(()), torch.zeros(2, 0, 4, dtype=torch.float8_e5m2)):
        assert through(Annotated[torch.Tensor, TensorMeta()], source).shape == source.shape


def test_what_has_no_tensor_where_its_type_allows_none_is_taken() -> None:
    assert through(Annotated[torch.Tensor | None, Pixels], None) is None
    assert through(list[Frames | None], [None]) == [None]
    assert through(Node, Node(below=[Node()])) == Node(below=[Node()])
    assert through(Late, Late()) == Late()
    assert through(Settings, {"mask": torch.zeros(0, 3, dtype=torch.uint8)}).keys() == {"mask"}


def test_each_of_a_union_is_checked_by_its_own_annotations() -> None:
    for type_, kind in ((Still | Moving, Moving), (Still | Blurred, Blurred)):
        received = through(type_, kind(torch.zeros(2)))
        assert type(received) is kind
        assert received.frames.tolist() == [0, 0]


def test_an_annotation_beside_another_is_checked_too() -> None:
    wrong = torch.zeros(3, 3, dtype=torch.uint8)

    with pytest.raises(ProtocolError, match=r"`\$\.other` .* any dtype of shape \(2, any\), found uint8"):
        through(Settings, {"mask": wrong, "other": wrong})


BELOW = {
    "a generic class, without a type": (BelowGeneric, {"x": None}),
    "one that stands for a type": (TwoBelowGeneric, {"x": None, "z": torch.zeros(3)}),
    "one with a field of its own": (TwoBelowGeneric, {"z": None, "x": torch.zeros(3)}),
    "a generic dataclass": (BelowGenericData, {"x": None}),
    "a named tuple": (BelowPoint, [None]),
    "a generic dict": (BelowGenericDict, {"v": None}),
}


@pytest.mark.parametrize(("type_", "message"), BELOW.values(), ids=BELOW)
def test_a_class_below_another_is_checked_by_what_that_says_too(type_: Any, message: Any) -> None:
    decoder: TensorDecoder[Any] = TensorDecoder(type_)

    def with_one(tensor: torch.Tensor) -> Any:
        if isinstance(message, list):
            return [tensor]
        return {name: tensor if value is None else value for name, value in message.items()}

    decoder.decode(TensorEncoder().encode(with_one(torch.zeros(3))))
    with pytest.raises(
        ProtocolError, match=r"expected any dtype of shape \(3,\), found float32 of shape \(4,\)"
    ):
        decoder.decode(TensorEncoder().encode(with_one(torch.zeros(4))))


@pytest.mark.parametrize("type_", [Diamond, DiamondData])
def test_of_two_classes_that_say_something_of_a_field_the_one_that_python_finds_first_counts(
    type_: Any,
) -> None:
    decoder: TensorDecoder[Any] = TensorDecoder(type_)
    assert decoder.decode(TensorEncoder().encode({"x": torch.zeros(4)})).x.shape == (4,)
    with pytest.raises(ProtocolError, match=r"expected any dtype of shape \(4,\)"):
        decoder.decode(TensorEncoder().encode({"x": torch.zeros(3)}))


@pytest.mark.parametrize(
    ("type_", "message"), [(Mixed, {"y": 1}), (MixedData, {"y": 1}), (MorePoint, [torch.zeros(3)])]
)
def test_what_is_annotated_and_no_field_is_not_looked_for(type_: Any, message: Any) -> None:
    decoder: TensorDecoder[Any] = TensorDecoder(type_)
    decoder.decode(TensorEncoder().encode(message))


def test_what_belongs_to_a_class_is_no_part_of_its_messages() -> None:
    assert through(Shared, Shared("a")).name == "a"


# Valid annotations


@pytest.mark.parametrize(
    ("type_", "refused"),
    [
        (Annotated[int, Pixels], "int"),
        (list[Annotated[str | None, Pixels]], "str"),
        (Annotated[list[torch.Tensor], Pixels], "list"),
        (Annotated[Any, Pixels], "Any"),
        (dict[str, Annotated[msgspec.msgpack.Ext, Pixels]], "Ext"),
        (dict[Annotated[str, Pixels], torch.Tensor], "str"),
        (of(Pixelated, int), "int"),
        (Annotated[Video, Pixels], "Video"),
    ],
    ids=str,
)
def test_what_is_stated_of_something_that_is_no_tensor_is_a_mistake(type_: Any, refused: str) -> None:
    with pytest.raises(
        TypeError, match=rf"a TensorMeta says what a tensor is like, and .*{refused}.* is none"
    ):
        TensorDecoder(type_)


def test_a_mistake_is_found_at_any_depth_before_any_message() -> None:
    class Wrong(msgspec.Struct):
        numbers: dict[str, tuple[int, Annotated[int, TensorMeta()]]]

    with pytest.raises(TypeError, match="is none"):
        TensorDecoder(list[Wrong])


@pytest.mark.parametrize("dtype", [np.uint8, "uint8", np.dtype("u1"), int, 3], ids=repr)
def test_a_dtype_is_one_of_torch(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"for example torch\.uint8, got"):
        TensorMeta(dtype=dtype)


@pytest.mark.parametrize("shape", [("3",), (1.0,), 3, 0, "", "33", (None, [1])], ids=repr)
def test_a_shape_is_a_tuple_of_whole_numbers(shape: Any) -> None:
    with pytest.raises(TypeError):
        TensorMeta(shape=shape)


@pytest.mark.parametrize("shape", [(-1,), (None, 3, -3)], ids=repr)
def test_a_size_is_not_negative(shape: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match=r"sizes of a shape are not negative, got \("):
        TensorMeta(shape=shape)


def test_two_that_state_the_same_are_the_same() -> None:
    assert TensorMeta(torch.uint8, (None, 3)) == Pixels
    assert hash(TensorMeta(torch.uint8, (None, 3))) == hash(Pixels)
    with pytest.raises(AttributeError):
        Pixels.dtype = torch.int8  # type: ignore[misc]


# Tensors and arrays


@pytest.mark.parametrize("inline_bytes", [1 << 20, 0], ids=["in the body", "beside it"])
def test_a_field_takes_a_tensor_or_an_array_and_gives_what_it_says(inline_bytes: int) -> None:
    tensor, array = torch.arange(6.0).reshape(2, 3), np.arange(6, dtype=np.uint16).reshape(3, 2)
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


def test_a_tensor_taken_as_an_array_is_not_copied_and_the_reverse() -> None:
    for source, type_ in ((torch.zeros(9000), np.ndarray), (np.zeros(9000), torch.Tensor)):
        body, buffer = sent(TensorEncoder().encode(source))
        received: Any = TensorDecoder(type_).decode([body, buffer])
        assert address_of(received) == address_of(buffer)


def test_a_tensor_that_wants_a_gradient_can_be_taken_as_an_array() -> None:
    assert through(np.ndarray, torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_a_tensor_that_numpy_does_not_know_cannot_be_taken_as_an_array() -> None:
    with pytest.raises(ProtocolError, match=r"array of torch\.bfloat16, which numpy does not know"):
        through(list[np.ndarray[Any, Any]], [torch.zeros(2, dtype=torch.bfloat16)])


def test_a_tensor_is_no_parameter_and_a_parameter_is_a_tensor() -> None:
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
    "any dtype, spelled out": (np.ndarray[Any, Any], ["u1", "f8"], []),
    "an optional": (npt.NDArray[np.uint8] | None, ["u1"], ["i1"]),
}


@pytest.mark.parametrize("kind", NUMPY_TYPES)
def test_the_dtype_that_an_array_is_said_to_have_is_checked(kind: str) -> None:
    type_, right, wrong = NUMPY_TYPES[kind]
    for dtype in right:
        source = np.ones((2, 2), dtype)
        for sent_as in (source, torch.from_numpy(source)):
            assert through(of(list, type_), [sent_as])[0].dtype == source.dtype
    for dtype in wrong:
        source = np.ones((2, 2), dtype)
        for sent_as in (source, torch.from_numpy(source)):
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
    "Expected `Tensor`, got `int` - at `$.parts[...][0].frames`": (Movie, {"parts": {"a": [{"frames": 3}]}}),
    "missing required field `frames` - at `$.parts[...][0]`": (Movie, {"parts": {"a": [{}]}}),
    "Expected `int`, got `ext` - at `$.item`": (Box[int], Box(torch.zeros(1))),
    "Expected `str`, got `ext` - at `$.item`": (Box[str], Box(np.zeros(9000))),
    "Expected `object`, got `ext` - at `$[0]`": (list[Video], [torch.zeros(1)]),
    "Invalid value 'Other' - at `$.type`": (Still | Moving, {"type": "Other", "frames": 1}),
    "Expected `array` of length 2, got 1": (tuple[torch.Tensor, torch.Tensor], [torch.zeros(1)]),
}


@pytest.mark.parametrize("text", OTHERS)
def test_another_type_is_refused_with_its_place(text: str) -> None:
    type_, message = OTHERS[text]
    with pytest.raises(ProtocolError) as caught:
        through(type_, message)

    assert str(caught.value).endswith(text)


@pytest.mark.parametrize("type_", [torch.Tensor | np.ndarray, torch.Tensor | int], ids=str)
def test_a_type_that_cannot_be_decoded_is_a_mistake_of_the_caller(type_: Any) -> None:
    with pytest.raises(TypeError, match="custom type"):
        TensorDecoder(type_)


def test_a_field_that_the_type_does_not_have_is_left_out_unless_it_has_a_buffer() -> None:
    decoder = TensorDecoder(Box[int])

    assert decoder.decode(TensorEncoder().encode({"item": 1, "small": torch.zeros(3)})) == Box(1)
    with pytest.raises(ProtocolError, match="a tensor is in a field that the type here does not have"):
        decoder.decode(TensorEncoder().encode({"item": 1, "large": torch.zeros(9000)}))
