"""Every position that an annotated tensor can have in a type."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    NamedTuple,
    NewType,
    NotRequired,
    Required,
    TypedDict,
    TypeVar,
)

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Parameter

from aiotensor.codec import TensorMeta
from tests.codec.messages import Box, Crate, Labelled, Options, of

T = TypeVar("T")
S = TypeVar("S")
Pixels = TensorMeta(dtype=torch.uint8, shape=(None, 3))
Frames = Annotated[torch.Tensor, Pixels]
Floats = Annotated[torch.Tensor, TensorMeta(dtype=torch.float32)]
AsArray = Annotated[np.ndarray[Any, Any], Pixels]
WithDtype = Annotated[npt.NDArray[np.generic], Pixels]
Named = NewType("Named", Frames)
Renamed = NewType("Renamed", Named)
Clip = NewType("Clip", torch.Tensor)
Inner = TypeVar("Inner", bound=Box[Frames])


class Video(msgspec.Struct):
    frames: Frames
    name: str = ""


class Movie(msgspec.Struct):
    parts: dict[str, list[Video]]


class Still(msgspec.Struct, tag=True):
    frames: Frames


class Moving(msgspec.Struct, tag=True):
    frames: Floats


class Blurred(Still, tag=True):
    frames: Floats


class Node(msgspec.Struct):
    frames: Frames | None = None
    below: "list[Node]" = []


class Late(msgspec.Struct):
    frames: Frames | msgspec.UnsetType = msgspec.UNSET


class Constant(msgspec.Struct):
    frames: Final[Frames]


class Short(msgspec.Struct, rename="upper"):
    frames: Frames


class Compact(msgspec.Struct, array_like=True):
    name: str
    frames: Frames


class Stack(msgspec.Struct, Generic[T]):
    box: Box[list[T]]


class OtherStack(msgspec.Struct, Generic[S]):
    box: Box[list[S]]


class BoxOfFrames(Box[Frames]):
    pass


class BoxOfBox(msgspec.Struct, Generic[T]):
    box: Box[Box[T]]


class BoxOfAny(msgspec.Struct, Generic[Inner]):
    item: Inner


class Pixelated(msgspec.Struct, Generic[T]):
    frames: Annotated[T, Pixels]


class Shared(msgspec.Struct):
    default: ClassVar[Frames] = torch.zeros(1)
    name: str


@dataclasses.dataclass(slots=True)
class Shot:
    frames: Frames
    camera: int = 0


class Numbered(NamedTuple):
    number: int
    frames: Frames


class Settings(TypedDict):
    mask: Required[Frames]
    other: NotRequired[Annotated[torch.Tensor | None, TensorMeta(shape=(2, None))]]


Make = Callable[[torch.Tensor], object]

# A type, a message of it with a tensor, and where that is.
POSITIONS: dict[str, tuple[Any, Make, str]] = {
    "alone": (Frames, lambda frames: frames, "$"),
    "a parameter": (Annotated[Parameter, Pixels], lambda frames: Parameter(frames, False), "$"),
    "an array": (AsArray, lambda frames: frames.numpy(), "$"),
    "an array of a dtype": (WithDtype, lambda frames: frames.numpy(), "$"),
    "an array, as a tensor": (Frames, lambda frames: frames.numpy(), "$"),
    "a tensor, as an array": (AsArray, lambda frames: frames, "$"),
    "two annotations": (Annotated[Frames, TensorMeta()], lambda frames: frames, "$"),
    "a Struct": (Video, Video, "$.frames"),
    "a Struct, nested": (Movie, lambda frames: Movie({"a": [Video(frames)]}), "$.parts['a'][0].frames"),
    "a Struct that is a list": (Compact, lambda frames: Compact("", frames), "$.frames"),
    "a Struct of other names": (Short, Short, "$.frames"),
    "a field that may be unset": (Late, Late, "$.frames"),
    "a field that is final": (Constant, Constant, "$.frames"),
    "a list": (list[Frames], lambda frames: [frames], "$[0]"),
    "the second of a list": (
        list[Frames],
        lambda frames: [torch.zeros((1, 3), dtype=torch.uint8), frames],
        "$[1]",
    ),
    "a sequence": (Sequence[Frames], lambda frames: [frames], "$[0]"),
    "a set": (set[Frames], lambda frames: [frames], "$[0]"),
    "a list in a list": (list[list[Frames]], lambda frames: [[], [frames]], "$[1][0]"),
    "a dict": (dict[str, Frames], lambda frames: {"a b": frames}, "$['a b']"),
    "a dict of numbers": (dict[int, Frames], lambda frames: {7: frames}, "$[7]"),
    "a mapping": (Mapping[str, list[Frames]], lambda frames: {"a": [frames]}, "$['a'][0]"),
    "a tuple": (tuple[int, Frames, str], lambda frames: (1, frames, ""), "$[1]"),
    "a tuple of any length": (tuple[Frames, ...], lambda frames: (frames,), "$[0]"),
    "an optional": (Frames | None, lambda frames: frames, "$"),
    "all of an optional": (Annotated[torch.Tensor | None, Pixels], lambda frames: frames, "$"),
    "all of an annotated optional": (
        Annotated[Annotated[torch.Tensor, "video"] | None, Pixels],
        lambda frames: frames,
        "$",
    ),
    "an optional in a list": (list[Frames | None], lambda frames: [None, frames], "$[1]"),
    "a union of Structs": (Still | Moving, Still, "$.frames"),
    "a union of a Struct and its parent": (Still | Blurred, Still, "$.frames"),
    "a union of a Struct and a list": (Video | list[int] | None, Video, "$.frames"),
    "a list of a union": (list[Moving | Still], lambda frames: [Still(frames)], "$[0].frames"),
    "a generic Struct": (Box[Frames], Box, "$.item"),
    "a generic Struct of a list": (Box[list[Frames]], lambda frames: Box([frames]), "$.item[0]"),
    "a generic Struct in another": (Box[Box[Frames]], lambda frames: Box(Box(frames)), "$.item.item"),
    "a generic Struct in one of the same variable": (
        BoxOfBox[Frames],
        lambda frames: BoxOfBox(Box(Box(frames))),
        "$.box.item.item",
    ),
    "a generic Struct of lists of the same variable": (
        Stack[Frames],
        lambda frames: Stack(Box([frames])),
        "$.box.item[0]",
    ),
    "a generic Struct of lists of another variable": (
        OtherStack[Frames],
        lambda frames: OtherStack(Box([frames])),
        "$.box.item[0]",
    ),
    "a child of a generic Struct": (BoxOfFrames, BoxOfFrames, "$.item"),
    "a generic Struct of a bound variable": (BoxOfAny, lambda frames: BoxOfAny(Box(frames)), "$.item.item"),
    "an annotated variable": (of(Pixelated, torch.Tensor), Pixelated, "$.frames"),
    "a generic dataclass": (Crate[Frames], lambda frames: Crate(1, frames), "$.item"),
    "a generic NamedTuple": (Labelled[Frames], lambda frames: Labelled("", frames), "$.item"),
    "a generic TypedDict": (Options[Frames], lambda frames: {"second": frames}, "$.second"),
    "a dataclass": (Shot, Shot, "$.frames"),
    "a NamedTuple": (Numbered, lambda frames: Numbered(1, frames), "$.frames"),
    "a TypedDict": (Settings, lambda frames: {"mask": frames}, "$.mask"),
    "a recursive Struct": (
        Node,
        lambda frames: Node(below=[Node(), Node(below=[Node(frames)])]),
        "$.below[1].below[0].frames",
    ),
    "a new type": (Named, lambda frames: frames, "$"),
    "a new type of a new type": (list[Renamed], lambda frames: [frames], "$[0]"),
    "an annotated new type": (Annotated[Clip, Pixels], lambda frames: frames, "$"),
}
