"""The check of `TensorMeta` annotations, which is derived once from each type and called for each message.

msgspec checks all types but ignores `TensorMeta`. This module therefore checks the annotated fields after
decoding.
"""

import enum
import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import torch

from aiotensor.codec.meta import MismatchError, TensorMeta

Check: TypeAlias = Callable[[Any], None]

# Not their subclasses, which the receiver cannot rebuild.
_DECODABLE = (torch.Tensor, torch.nn.Parameter, np.ndarray)

_TENSORS = (torch.Tensor, np.ndarray)

# No parts of these are parts of a message, and their annotations may be for type checkers only.
_WITHOUT_PARTS = (*_TENSORS, enum.Enum)

_SAME = (typing.Required, typing.NotRequired, Final)  # equivalent to the type in their brackets


def expectations(type_: Any) -> Check | None:
    """Return a function that checks decoded messages of a type; None if the type has no `TensorMeta`.

    The function raises `MismatchError`.

    Raises:
        TypeError: a `TensorMeta` annotates a type other than a tensor, or a part of a container.
    """
    walk = _Walk()
    check = walk.check_of(type_)
    return check if walk.has_meta else None  # a Struct has a check in any case


@functools.lru_cache(maxsize=1024)
def check_before_sending(type_: type) -> Check | None:
    """Return the check of a Struct for the sending side, before any tensor is copied; None if there is none.

    The function raises a `TypeError` if a tensor does not match its `TensorMeta`.
    """
    try:
        check = expectations(type_)
    except NameError:
        return None  # only type checkers can resolve its annotations, and msgspec does not need to
    if check is None:
        return None

    def check_tensors(message: Any) -> None:
        try:
            check(message)
        except MismatchError as error:
            raise TypeError(f"`${error.path}` does not match its annotation: {error}") from None

    return check_tensors


def check_decodable(type_: Any) -> bool:
    """Check that every field of a type can be decoded; return whether each tensor or array is a `Tensor`.

    Raises:
        TypeError: a field cannot be decoded.
    """
    try:
        found = [msgspec.inspect.type_info(type_)]
    except TypeError as error:
        if "custom type" not in str(error):
            raise
        raise TypeError(
            f"{error}. In a union with other types than None, a tensor or an array cannot be checked by its "
            "type: annotate the field as `Any`, which accepts tensors, arrays, and containers of them, or "
            "use a separate field for each type"
        ) from None
    seen, only_tensors = set(), True
    while found:
        one: Any = found.pop()
        if isinstance(one, msgspec.inspect.AnyType):
            only_tensors = False
        elif isinstance(one, msgspec.inspect.CustomType):
            if (get_origin(one.cls) or one.cls) not in _DECODABLE:
                raise TypeError(
                    f"a message of type {type_!r} cannot be decoded: it contains a {one.cls!r}; annotate a "
                    "tensor as torch.Tensor, with a TensorMeta for its dtype and shape, and convert other "
                    "objects"
                )
            only_tensors = only_tensors and one.cls is torch.Tensor
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, msgspec.inspect.Type | msgspec.inspect.Field):
            found += [getattr(one, name) for name in one.__struct_fields__]
        elif isinstance(one, tuple | list):
            found += one
    return only_tensors


# Each check ignores values of other types, so that the checks of all arms of a union can be called with the
# same value. The path of a mismatch is only assembled once the mismatch is found.


class _Walk:
    """Derive the check of a type, visiting each Struct in it once."""

    def __init__(self) -> None:
        self.has_meta = False  # whether a `TensorMeta` was found
        self._structs: dict[Any, Check] = {}

    def check_of(self, type_: Any) -> Check | None:
        """Return the check of a type without type variables; None if there is nothing to check."""
        type_ = _plain(type_)
        origin, args = get_origin(type_), get_args(type_)
        if origin is Annotated:
            return self._annotated(args[0], type_.__metadata__)
        if origin in (typing.Union, types.UnionType):
            return _all_of([self.check_of(arm) for arm in args])
        kind = origin or type_
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(kind, type_)
        _refuse_metas(type_)
        return None

    def _annotated(self, inner: Any, metas: tuple[Any, ...]) -> Check | None:
        checks = [self.check_of(inner)]
        for meta in metas:
            if meta is TensorMeta:
                raise TypeError("use TensorMeta(...) in an annotation, with the expected dtype and shape")
            if isinstance(meta, TensorMeta):
                if not any(isinstance(arm, type) and issubclass(arm, _TENSORS) for arm in arms(inner)):
                    raise TypeError(f"a TensorMeta describes a tensor, but {inner!r} is not a tensor")
                self.has_meta = True
                checks.append(meta.check)
        return _all_of(checks)

    def _struct(self, kind: type, type_: Any) -> Check:
        """Return the check of the fields of a Struct."""
        if type_ not in self._structs:
            checks: list[tuple[str, Check]] = []

            def check_fields(value: Any) -> None:
                if type(value) is not kind:  # a subclass may annotate the same field differently
                    return
                for name, check in checks:
                    try:
                        check(getattr(value, name))
                    except MismatchError as error:
                        error.path = f".{name}{error.path}"
                        raise

            self._structs[type_] = check_fields  # for fields that contain the Struct itself
            for field in msgspec.structs.fields(type_):
                check = self.check_of(field.type)
                if check is not None:
                    checks.append((field.name, check))
        return self._structs[type_]


def _refuse_metas(type_: Any) -> None:
    """Check that no part of a container or of another class is annotated, since its values are not checked.

    Raises:
        TypeError: it contains a `TensorMeta`.
    """
    seen: set[type] = set()
    parts = [type_]
    for part in parts:  # the loop appends to it
        if isinstance(part, TensorMeta):
            raise TypeError(
                f"{type_!r} contains a TensorMeta: it can annotate a tensor that is a field of a "
                "msgspec.Struct, or the whole message, but not one in a container or another kind of class"
            )
        plain = _plain(part)
        parts += get_args(plain)
        kind = get_origin(plain) or plain
        if isinstance(kind, type) and kind not in seen and not issubclass(kind, _WITHOUT_PARTS):
            seen.add(kind)
            parts += typing.get_type_hints(kind, include_extras=True).values()


def _plain(type_: Any) -> Any:
    """Resolve type variables without a binding, aliases, `NewType` and qualifiers of a type."""
    while True:
        if isinstance(type_, TypeVar) and type_.__constraints__:
            type_ = typing.Union[type_.__constraints__]  # noqa: UP007 - their number varies
        elif isinstance(type_, TypeVar):
            type_ = type_.__bound__ or Any
        elif hasattr(type_, "__supertype__"):  # of a NewType
            type_ = type_.__supertype__
        elif hasattr(type_, "__value__"):  # of a `type` statement
            type_ = type_.__value__
        elif get_origin(type_) in _SAME:
            (type_,) = get_args(type_)
        else:
            return type_


def arms(type_: Any) -> Iterator[Any]:
    """Yield the arms of a union, even inside aliases and annotations; any other type yields only itself."""
    type_ = _plain(type_)
    origin, args = get_origin(type_), get_args(type_)
    if origin is Annotated:
        yield from arms(args[0])
    elif origin in (typing.Union, types.UnionType):
        for arm in args:
            yield from arms(arm)
    else:
        yield origin or type_


def _all_of(checks: list[Check | None]) -> Check | None:
    several = [check for check in checks if check is not None]

    def check_all(value: Any) -> None:
        for check in several:
            check(value)

    return several[0] if len(several) == 1 else check_all if several else None
