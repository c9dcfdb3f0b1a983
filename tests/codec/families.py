"""Subclasses of message types, for every way in which a subclass can relate to the fields of its base."""

from typing import Annotated, Any, Generic, TypeVar

import msgspec
import torch

from aiotensor.codec import TensorMeta

__all__ = [
    "BelowGeneric",
    "Diamond",
    "Mixed",
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


class _Top(msgspec.Struct):
    x: Three


class _Left(_Top):
    pass


class _Right(_Top):
    x: Four


class Diamond(_Left, _Right):
    pass


class _Mixin:
    x: Three


class Mixed(_Mixin, msgspec.Struct):
    y: int
