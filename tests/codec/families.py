"""Subclasses of message types, for every way in which a subclass can relate to the fields of its base."""

import dataclasses
from typing import Annotated, Any, Generic, NamedTuple, TypedDict, TypeVar

import attrs
import msgspec
import torch

from aiotensor.codec import TensorMeta

__all__ = [
    "BelowAttributes",
    "BelowGeneric",
    "BelowGenericData",
    "BelowGenericDict",
    "BelowPoint",
    "Diamond",
    "DiamondData",
    "Mixed",
    "MixedData",
    "MorePoint",
    "TwoBelowGeneric",
]

T = TypeVar("T")

Three = Annotated[torch.Tensor, TensorMeta(shape=(3,))]
Four = Annotated[torch.Tensor, TensorMeta(shape=(4,))]


class _Generic(msgspec.Struct, Generic[T], kw_only=True):
    x: Three
    v: Any = None


class BelowGeneric(_Generic):  # type: ignore[type-arg]
    y: int = 0


class _Middle(_Generic[int]):
    z: Three


class TwoBelowGeneric(_Middle):
    w: int = 0


@dataclasses.dataclass
class _GenericData(Generic[T]):
    x: Three


@dataclasses.dataclass
class BelowGenericData(_GenericData):  # type: ignore[type-arg]
    y: int = 0


@attrs.define
class _Attributes:
    x: Three


@attrs.define
class BelowAttributes(_Attributes):
    y: int = 0


class Point(NamedTuple):
    x: Three


class BelowPoint(Point):
    pass


class MorePoint(Point):
    more: Three


class _GenericDict(TypedDict, Generic[T]):
    v: T


class BelowGenericDict(_GenericDict[Three]):
    pass


class _Top(msgspec.Struct):
    x: Three


class _Left(_Top):
    pass


class _Right(_Top):
    x: Four


class Diamond(_Left, _Right):
    pass


@dataclasses.dataclass
class _TopData:
    x: Three


@dataclasses.dataclass
class _LeftData(_TopData):
    y: int = 0


@dataclasses.dataclass
class _RightData(_TopData):
    x: Four


@dataclasses.dataclass
class DiamondData(_LeftData, _RightData):
    pass


class _Mixin:
    x: Three


class Mixed(_Mixin, msgspec.Struct):
    y: int


@dataclasses.dataclass
class MixedData(_Mixin):
    y: int
