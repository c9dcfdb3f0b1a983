"""The check of `TensorMeta` annotations, which is derived once from each type and called for each message.

msgspec checks all types but ignores `TensorMeta`. This module therefore checks a message after decoding, but
only those parts that can contain an annotated tensor.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import torch

from aiotensor.codec.meta import MismatchError, TensorMeta

__all__ = ["Check", "arms", "check_decodable", "expectations"]

Check: TypeAlias = Callable[[Any], None]

_SAME = (typing.Required, typing.NotRequired, Final)  # equivalent to the type in their brackets
_SEQUENCES = (list, tuple, set, frozenset)
_MAX_KEY = 64  # the maximum number of characters of a key in a path


def expectations(type_: Any) -> Check | None:
    """Return a function that checks decoded messages of a type; None if the type has no `TensorMeta`.

    The function raises `MismatchError`.

    Raises:
        TypeError: a `TensorMeta` annotates a type other than a tensor.
    """
    walk = _Walk()
    check = walk.check_of(type_)
    return check if walk.has_meta else None  # a class that contains itself has a check in any case


def check_decodable(type_: Any) -> None:
    """Check that every field of a type can be decoded.

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
    seen = set()
    while found:
        one: Any = found.pop()
        if isinstance(one, msgspec.inspect.CustomType) and not _is_tensor(get_origin(one.cls) or one.cls):
            raise TypeError(f"a message of type {type_!r} cannot be decoded: it contains a {one.cls!r}")
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, msgspec.inspect.Type | msgspec.inspect.Field):
            found += [getattr(one, name) for name in one.__struct_fields__]
        elif isinstance(one, tuple | list):
            found += one


# Each check ignores values of other types, so that the checks of all arms of a union can be called with the
# same value. The path of a mismatch is only assembled once the mismatch is found.


def _parts(
    kinds: type | tuple[type, ...],
    items_of: Callable[[Any], Iterable[tuple[object, Any]]],
    checks: Iterable[Check | None],
) -> Check:
    """Return the check of a container; `items_of` returns its items with their keys or indices."""

    def check_parts(value: Any) -> None:
        if not isinstance(value, kinds):
            return
        for (key, item), check in zip(items_of(value), checks, strict=False):
            try:
                if check is not None:
                    check(item)
            except MismatchError as error:
                error.path = f"[{repr(key)[:_MAX_KEY]}]{error.path}"
                raise

    return check_parts


def _fields(kind: Any, checks: list[tuple[str, Check]]) -> Check:
    """Return the check of a class; `checks` may be filled later, since a class may contain itself."""
    kind = dict if typing.is_typeddict(kind) else kind

    def check_fields(value: Any) -> None:
        if type(value) is not kind:  # a subclass may annotate the same field differently
            return
        for name, check in checks:
            try:
                check(value.get(name) if kind is dict else getattr(value, name))
            except MismatchError as error:
                error.path = f".{name}{error.path}"
                raise

    return check_fields


class _Walk:
    """Derive the check of a type, visiting each class in it once."""

    def __init__(self) -> None:
        self.has_meta = False  # whether a `TensorMeta` was found
        self._classes: dict[Any, Check | None] = {}

    def check_of(self, type_: Any) -> Check | None:
        """Return the check of a type without type variables; None if there is nothing to check."""
        type_ = _plain(type_)
        origin, args = get_origin(type_), get_args(type_)
        if origin is Annotated:
            return self._annotated(args[0], type_.__metadata__)
        if origin in (typing.Union, types.UnionType):
            return _all_of([self.check_of(arm) for arm in args])
        kind = origin or type_
        if not isinstance(kind, type) or _is_tensor(kind):
            return None
        if _field_names(kind) is not None:
            return self._class(kind, type_)
        if not args:
            return None
        if kind is tuple and args[-1] is not Ellipsis:
            checks = [self.check_of(arm) for arm in args]
            return _parts(tuple, enumerate, checks) if any(checks) else None
        if not issubclass(kind, Mapping):
            inner = self.check_of(args[0])
            return None if inner is None else _parts(_SEQUENCES, enumerate, repeat(inner))
        if self.check_of(args[0]) is not None:
            raise TypeError(f"a TensorMeta describes a tensor, but the keys of {type_!r} are not tensors")
        inner = self.check_of(args[1])
        return None if inner is None else _parts(dict, dict.items, repeat(inner))

    def _annotated(self, inner: Any, metas: tuple[Any, ...]) -> Check | None:
        checks = [self.check_of(inner)]
        for meta in metas:
            if meta is TensorMeta:
                raise TypeError("use TensorMeta(...) in an annotation, with the expected dtype and shape")
            if isinstance(meta, TensorMeta):
                if not any(_is_tensor(arm) for arm in arms(inner)):
                    raise TypeError(f"a TensorMeta describes a tensor, but {inner!r} is not a tensor")
                self.has_meta = True
                checks.append(meta.check)
        return _all_of(checks)

    def _class(self, kind: type, type_: Any) -> Check | None:
        """Return the check of a class; None if there is nothing to check in its fields."""
        if type_ not in self._classes:
            checks: list[tuple[str, Check]] = []
            self._classes[type_] = _fields(kind, checks)  # for fields that contain the class itself
            for name, hint in _hints(type_):
                check = self.check_of(hint)
                if check is not None:
                    checks.append((name, check))
            if not checks:
                self._classes[type_] = None
        return self._classes[type_]


def _hints(type_: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a class and their types, with type variables replaced."""
    kind = get_origin(type_) or type_
    said: dict[Any, dict[str, Any]] = {}
    _collect(type_, said)
    # The first class in the method resolution order takes precedence; a TypedDict has no such order.
    order = said if typing.is_typeddict(kind) else reversed(kind.__mro__)
    found: dict[str, Any] = {}
    for one in order:
        found |= said.get(one, {})
    for name in _field_names(kind) or ():
        if name in found:
            yield name, found[name]


def _collect(type_: Any, said: dict[Any, dict[str, Any]]) -> None:
    """Collect the annotations of a class and of each of its base classes."""
    kind = get_origin(type_) or type_
    variables = getattr(kind, "__parameters__", ())
    given = get_args(type_) or tuple(map(_default, variables))
    bindings = dict(zip(variables, given, strict=False))
    own = inspect.get_annotations(kind)
    # Not `getattr`, which returns the inherited attribute if a class has no generic bases.
    for base in reversed(vars(kind).get("__orig_bases__", kind.__bases__)):
        plain = get_origin(base) or base
        if isinstance(plain, type) and plain is not object and plain is not typing.Generic:
            _collect(_bound(base, bindings), said)
            if typing.is_typeddict(kind):  # its annotations include those of its bases
                above = inspect.get_annotations(plain)
                own = {name: hint for name, hint in own.items() if above.get(name) is not hint}
    if own:
        hints = typing.get_type_hints(kind, include_extras=True)
        said[kind] = {name: _bound(hints[name], bindings) for name in own if name in hints}


def _field_names(kind: Any) -> Iterable[str] | None:
    """Return the names of the fields of a class; None if it has no fields, even if it has annotations."""
    names: Iterable[str] | None = None
    if issubclass(kind, msgspec.Struct):
        names = kind.__struct_fields__
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif typing.is_typeddict(kind):
        names = kind.__annotations__
    elif hasattr(kind, "__attrs_attrs__"):
        names = [attribute.name for attribute in kind.__attrs_attrs__]
    elif issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
    return names


def _bound(hint: Any, bindings: Mapping[Any, Any]) -> Any:
    """Replace the type variables in an annotation with their types."""
    if isinstance(hint, TypeVar):
        return bindings.get(hint, _default(hint))
    variables = () if isinstance(hint, type) and not get_origin(hint) else getattr(hint, "__parameters__", ())
    return hint[tuple(bindings.get(one, _default(one)) for one in variables)] if variables else hint


def _default(variable: Any) -> Any:
    """Return the type that replaces a type variable without a binding."""
    if getattr(variable, "__constraints__", ()):
        return typing.Union[variable.__constraints__]  # noqa: UP007 - their number varies
    return getattr(variable, "__bound__", None) or Any


def _plain(type_: Any) -> Any:
    """Resolve type variables, aliases, `NewType` and qualifiers of a type."""
    while True:
        if isinstance(type_, TypeVar):
            type_ = _default(type_)
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


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.Tensor | np.ndarray)
