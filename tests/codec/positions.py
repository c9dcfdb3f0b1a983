"""Every position that an annotated tensor can have in a type."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Generic,
    NewType,
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
Pixels = TensorMeta(dtype=torch.uint8, shape=(None, 3))
Frames = Annotated[torch.Tensor, Pixels]
Floats = Annotated[torch.Tensor, TensorMeta(dtype=torch.float32)]
AsArray = Annotated[np.ndarray[Any, Any], Pixels]
WithDtype = Annotated[npt.NDArray[np.generic], Pixels]
Named = NewType("Named", Frames)
Renamed = NewType("Renamed", Named)
Clip = NewType("Clip", torch.Tensor)


class Video(msgspec.Struct):
    frames: Frames
    name: str = ""


class Movie(msgspec.Struct):
    video: Video


class Still(msgspec.Struct, tag=True):
    frames: Frames


class Moving(msgspec.Struct, tag=True):
    frames: Floats


class Blurred(Still, tag=True):
    frames: Floats


class Node(msgspec.Struct):
    frames: Frames | None = None
    below: "Node | None" = None


class Late(msgspec.Struct):
    frames: Frames | msgspec.UnsetType = msgspec.UNSET


class Compact(msgspec.Struct, array_like=True):
    name: str
    frames: Frames


class BoxOfFrames(Box[Frames]):
    pass


class Pixelated(msgspec.Struct, Generic[T]):
    frames: Annotated[T, Pixels]


@dataclasses.dataclass(slots=True)
class Shot:
    frames: Frames
    camera: int = 0


class Settings(TypedDict):
    mask: Required[Frames]


class Reel(msgspec.Struct):
    videos: list[Video]


Three = Annotated[torch.Tensor, TensorMeta(shape=(3,))]
Four = Annotated[torch.Tensor, TensorMeta(shape=(4,))]


class _Generic(msgspec.Struct, Generic[T], kw_only=True):
    x: Three
    v: Any = None


class BelowGeneric(_Generic):  # type: ignore[type-arg]
    y: int = 0


class _Top(msgspec.Struct):
    x: Three


class _Left(_Top):
    pass


class _Right(_Top):
    x: Four


class Diamond(_Left, _Right):
    pass


# Types that contain an annotation where it cannot be checked.
REFUSED: dict[str, Any] = {
    "a list": list[Frames],
    "a sequence": Sequence[Frames],
    "a set": set[Frames],
    "a dict": dict[str, Frames],
    "the keys of a dict": dict[Frames, int],
    "a mapping": Mapping[str, list[Frames]],
    "a tuple": tuple[int, Frames, str],
    "an optional in a list": list[Frames | None],
    "an optional list": list[Renamed] | None,
    "a Struct in a list": list[Video],
    "a list in a Struct": Reel,
    "a list in a generic Struct": Box[list[Frames]],
    "a dataclass": Shot,
    "a dataclass in a Struct": Box[Shot],
    "a generic dataclass": Crate[Frames],
    "a generic NamedTuple": Labelled[Frames],
    "a TypedDict": Settings,
    "a generic TypedDict": Options[Frames],
}


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
    "a Struct, nested": (Movie, lambda frames: Movie(Video(frames)), "$.video.frames"),
    "a Struct that is a list": (Compact, lambda frames: Compact("", frames), "$.frames"),
    "a field that may be unset": (Late, Late, "$.frames"),
    "an optional": (Frames | None, lambda frames: frames, "$"),
    "all of an optional": (Annotated[torch.Tensor | None, Pixels], lambda frames: frames, "$"),
    "a union of Structs": (Still | Moving, Still, "$.frames"),
    "a union of a Struct and its parent": (Still | Blurred, Still, "$.frames"),
    "a union of a Struct and a list": (Video | list[int] | None, Video, "$.frames"),
    "a generic Struct": (Box[Frames], Box, "$.item"),
    "a generic Struct in another": (Box[Box[Frames]], lambda frames: Box(Box(frames)), "$.item.item"),
    "a child of a generic Struct": (BoxOfFrames, BoxOfFrames, "$.item"),
    "an annotated variable": (of(Pixelated, torch.Tensor), Pixelated, "$.frames"),
    "a recursive Struct": (
        Node,
        lambda frames: Node(below=Node(below=Node(frames))),
        "$.below.below.frames",
    ),
    "a new type": (Named, lambda frames: frames, "$"),
    "a new type of a new type": (Box[Renamed], Box, "$.item"),
    "an annotated new type": (Annotated[Clip, Pixels], lambda frames: frames, "$"),
}
