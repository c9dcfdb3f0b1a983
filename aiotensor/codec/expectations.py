"""What annotations say of the tensors in a message: read once for each type, and checked for each message.

msgspec checks every type but does not look at `TensorMeta`, so whatever of a type can hold one is walked here
after decoding, and nothing else.
"""

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import torch

from aiotensor.errors import ProtocolError

__all__ = ["TensorMeta", "expectations"]


class TensorMeta(msgspec.Struct, frozen=True):
    """State what a tensor or array in a message must be like.

    Use as ``Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]``.

    Args:
        dtype: of its elements; None for any. For an array too this is a torch dtype.
        shape: its dimensions, in elements; a None in it is a dimension of any size, and None for all of it
            allows any number of dimensions.

    Raises:
        TypeError: the dtype is no torch dtype.
        ValueError: a size is negative.
    """

    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype is a torch dtype, for example torch.uint8, got {self.dtype!r}")
        if any(size is not None and operator.index(size) < 0 for size in self.shape or ()):
            raise ValueError(f"the sizes of a shape are not negative, got {self.shape}")

    def check(self, value: object, path: str) -> None:
        """Compare a tensor with what is stated; None, where the type allows it, is as good.

        Raises:
            ProtocolError: it is not like that; the text says where, what was expected and what was found.
        """
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, torch.Tensor) and not self._allows(value):
            found = _describe(value.dtype, tuple(value.shape))
            raise ProtocolError(
                f"`{path}` is not as its annotation says: expected {_describe(self.dtype, self.shape)}, "
                f"found {found}"
            )

    def _allows(self, tensor: torch.Tensor) -> bool:
        if self.dtype is not None and tensor.dtype != self.dtype:
            return False
        if self.shape is None:
            return True
        sizes = zip(self.shape, tensor.shape, strict=False)
        return len(self.shape) == tensor.dim() and all(want is None or want == size for want, size in sizes)


def _describe(dtype: torch.dtype | None, shape: tuple[int | None, ...] | None) -> str:
    name = "any dtype" if dtype is None else str(dtype).removeprefix("torch.")
    if shape is None:
        return f"{name} of any shape"
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{name} of shape ({sizes}{',' if len(shape) == 1 else ''})"


Check: TypeAlias = Callable[[Any, str], None]


def expectations(type_: Any) -> Check | None:
    """Return what checks a decoded message of a type, or None if the type expects nothing of a tensor.

    Raises:
        TypeError: a `TensorMeta` is where no tensor can be.
    """
    walk = _Walk()
    check = walk.check_of(type_, {})
    return check if walk.found else None


# Each of these checks what it knows and lets everything else pass, so the arms of a union share a value.


class _Items:
    """Check each item of a list, set or tuple."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, value: Any, path: str) -> None:
        if isinstance(value, list | tuple | set | frozenset):
            for number, item in enumerate(value):
                self._check(item, f"{path}[{number}]")


class _Places:
    """Check the items of a tuple, each by its own type."""

    def __init__(self, checks: list[Check | None]) -> None:
        self._checks = checks

    def __call__(self, value: Any, path: str) -> None:
        if isinstance(value, tuple):
            for number, (item, check) in enumerate(zip(value, self._checks, strict=False)):
                if check is not None:
                    check(item, f"{path}[{number}]")


class _Values:
    """Check each value of a dict."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                self._check(item, f"{path}[{key!r}]")


class _Fields:
    """Check the fields of a class. Filled after it is made, since a class may hold itself."""

    def __init__(self, kind: type) -> None:
        self._kind: Any = dict if typing.is_typeddict(kind) else kind
        self.checks: list[tuple[str, Check]] = []

    def __call__(self, value: Any, path: str) -> None:
        if not isinstance(value, self._kind):
            return
        for name, check in self.checks:
            field = value.get(name) if self._kind is dict else getattr(value, name)
            check(field, f"{path}.{name}")


class _Walk:
    """Go through a type, and through every class in it once."""

    def __init__(self) -> None:
        self.found = False  # a `TensorMeta`
        self._classes: dict[Any, _Fields] = {}

    def check_of(self, type_: Any, bindings: Mapping[Any, Any]) -> Check | None:
        """Return what checks a value of a type.

        Args:
            type_: any annotation.
            bindings: what the type variables of the class around it stand for.
        """
        if isinstance(type_, TypeVar):
            type_ = bindings.get(type_, object)
        for alias in ("__supertype__", "__value__"):  # of a NewType, and of a `type` statement
            type_ = getattr(type_, alias, type_)
        origin, args = get_origin(type_), get_args(type_)
        if origin is Annotated:
            return self._annotated(args[0], type_.__metadata__, bindings)
        if origin in (typing.Union, types.UnionType, typing.Required, typing.NotRequired):
            return _all_of([self.check_of(arm, bindings) for arm in args])
        kind = origin or type_
        if not isinstance(kind, type) or _is_tensor(kind):
            return None
        if _has_fields(kind):
            return self._class(kind, type_, args, bindings)
        if not args:
            return None
        if kind is tuple and args[-1] is not Ellipsis:
            checks = [self.check_of(arm, bindings) for arm in args]
            return _Places(checks) if any(checks) else None
        inner = self.check_of(args[1 if issubclass(kind, Mapping) else 0], bindings)
        if inner is None:
            return None
        return _Values(inner) if issubclass(kind, Mapping) else _Items(inner)

    def _annotated(self, inner: Any, metas: tuple[Any, ...], bindings: Mapping[Any, Any]) -> Check | None:
        checks = [self.check_of(inner, bindings)]
        arms = get_args(inner) if get_origin(inner) in (typing.Union, types.UnionType) else (inner,)
        for meta in metas:
            if isinstance(meta, TensorMeta):
                if not any(_is_tensor(get_origin(arm) or arm) for arm in arms):
                    raise TypeError(f"a TensorMeta says what a tensor is like, and {inner!r} is none")
                self.found = True
                checks.append(meta.check)
        return _all_of(checks)

    def _class(self, kind: type, type_: Any, args: tuple[Any, ...], bindings: Mapping[Any, Any]) -> _Fields:
        bound = tuple(bindings.get(arg, arg) for arg in args)
        if (kind, bound) not in self._classes:
            fields = self._classes[kind, bound] = _Fields(kind)
            inside = dict(zip(getattr(kind, "__parameters__", ()), bound, strict=False))
            for name, hint in typing.get_type_hints(kind, include_extras=True).items():
                check = self.check_of(hint, inside)
                if check is not None and typing.get_origin(hint) is not typing.ClassVar:
                    fields.checks.append((name, check))
        return self._classes[kind, bound]


def _all_of(checks: list[Check | None]) -> Check | None:
    several = [check for check in checks if check is not None]

    def check_all(value: Any, path: str) -> None:
        for check in several:
            check(value, path)

    return several[0] if len(several) == 1 else check_all if several else None


def _has_fields(kind: type) -> bool:
    return (
        issubclass(kind, msgspec.Struct)
        or dataclasses.is_dataclass(kind)
        or typing.is_typeddict(kind)
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
        or hasattr(kind, "__attrs_attrs__")
    )


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.Tensor | np.ndarray)
