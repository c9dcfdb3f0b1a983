"""What annotations say of the tensors in a message: read once for each type, and checked for each message.

msgspec checks every type but does not look at `TensorMeta`, so whatever of a type can hold one is walked here
after decoding, and nothing else.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import torch

from aiotensor.codec.meta import MismatchError, TensorMeta

__all__ = ["Check", "arms", "check_decodable", "expectations"]

Check: TypeAlias = Callable[[Any], None]

_SAME = (typing.Required, typing.NotRequired, Final)  # as the type in their brackets
_MAX_KEY = 64  # characters of a key in a path


def expectations(type_: Any) -> Check | None:
    """Return what checks a decoded message of a type, or None if the type expects nothing of a tensor.

    What it returns raises `MismatchError`.

    Raises:
        TypeError: a `TensorMeta` is where no tensor can be.
    """
    return _Walk().check_of(type_)


def check_decodable(type_: Any) -> None:
    """Refuse a type that has a field which nobody can decode.

    Raises:
        TypeError: it has one.
    """
    found, seen = [msgspec.inspect.type_info(type_)], set()
    while found:
        one: Any = found.pop()
        if isinstance(one, msgspec.inspect.CustomType) and not _is_tensor(get_origin(one.cls) or one.cls):
            raise TypeError(
                f"a message of type {type_!r} cannot be decoded: nobody knows how to read a {one.cls!r}"
            )
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, msgspec.inspect.Type | msgspec.inspect.Field):
            found += [getattr(one, name) for name in one.__struct_fields__]
        elif isinstance(one, tuple | list):
            found += one


# Each of these checks what it knows and lets everything else pass, so the arms of a union share a value. What
# is wrong is told with its place, which is put together only then.


class _Items:
    """Check each item of a list, set or tuple."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, value: Any) -> None:
        if isinstance(value, list | tuple | set | frozenset):
            for number, item in enumerate(value):
                try:
                    self._check(item)
                except MismatchError as error:
                    error.path = f"[{number}]{error.path}"
                    raise


class _Places:
    """Check the items of a tuple, each by its own type."""

    def __init__(self, checks: list[Check | None]) -> None:
        self._checks = checks

    def __call__(self, value: Any) -> None:
        if isinstance(value, tuple):
            for number, (item, check) in enumerate(zip(value, self._checks, strict=False)):
                try:
                    if check is not None:
                        check(item)
                except MismatchError as error:
                    error.path = f"[{number}]{error.path}"
                    raise


class _Values:
    """Check each value of a dict."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                try:
                    self._check(item)
                except MismatchError as error:
                    error.path = f"[{repr(key)[:_MAX_KEY]}]{error.path}"
                    raise


class _Fields:
    """Check the fields of a class. Filled after it is made, since a class may hold itself."""

    def __init__(self, kind: Any) -> None:
        self._kind = dict if typing.is_typeddict(kind) else kind
        self.checks: list[tuple[str, Check]] = []

    def __call__(self, value: Any) -> None:
        if type(value) is not self._kind:  # a class below it may say something else of the same field
            return
        for name, check in self.checks:
            try:
                check(value.get(name) if self._kind is dict else getattr(value, name))
            except MismatchError as error:
                error.path = f".{name}{error.path}"
                raise


class _Walk:
    """Go through a type, and through every class in it once."""

    def __init__(self) -> None:
        self._classes: dict[Any, _Fields | None] = {}
        self._open: dict[Any, _Fields] = {}  # classes that are being walked
        self._met: set[Any] = set()  # of these, which were met again
        self._is_useful = False  # there is something to check

    def check_of(self, type_: Any) -> Check | None:
        """Return what checks a value of a type, in which no type variable is left."""
        type_ = _plain(type_)
        origin, args = get_origin(type_), get_args(type_)
        if origin is Annotated:
            return self._annotated(args[0], type_.__metadata__)
        if origin in (typing.Union, types.UnionType):
            return _all_of([self.check_of(arm) for arm in args])
        kind = origin or type_
        if not isinstance(kind, type) or _is_tensor(kind):
            return None
        if _has_fields(kind):
            return self._class(kind, type_)
        if not args:
            return None
        if kind is tuple and args[-1] is not Ellipsis:
            checks = [self.check_of(arm) for arm in args]
            return _Places(checks) if any(checks) else None
        if not issubclass(kind, Mapping):
            inner = self.check_of(args[0])
            return None if inner is None else _Items(inner)
        if self.check_of(args[0]) is not None:
            raise TypeError(f"a TensorMeta says what a tensor is like, and no key of {type_!r} is one")
        inner = self.check_of(args[1])
        return None if inner is None else _Values(inner)

    def _annotated(self, inner: Any, metas: tuple[Any, ...]) -> Check | None:
        checks = [self.check_of(inner)]
        for meta in metas:
            if meta is TensorMeta:
                raise TypeError("write TensorMeta(...) in an annotation, with what the tensor must be like")
            if isinstance(meta, TensorMeta):
                if not any(_is_tensor(arm) for arm in arms(inner)):
                    raise TypeError(f"a TensorMeta says what a tensor is like, and {inner!r} is none")
                self._is_useful = True
                checks.append(meta.check)
        return _all_of(checks)

    def _class(self, kind: type, type_: Any) -> _Fields | None:
        """Walk a class; one in which nothing but itself is met is nothing to check."""
        if type_ in self._open:
            self._met.add(type_)
            return self._open[type_]
        if type_ not in self._classes:
            outer = self._met, self._is_useful
            self._met, self._is_useful = set(), False
            fields = self._open[type_] = _Fields(kind)
            for name, hint in _hints(type_):
                check = self.check_of(hint)
                if check is not None:
                    fields.checks.append((name, check))
            del self._open[type_]
            self._met.discard(type_)
            self._classes[type_] = fields if self._is_useful or self._met else None
            self._met, self._is_useful = self._met | outer[0], self._is_useful or outer[1]
        found = self._classes[type_]
        self._is_useful |= found is not None
        return found


def _hints(type_: Any) -> Iterator[tuple[str, Any]]:
    """List the fields of a class, and what they are to be; nothing generic is left in that."""
    kind = get_origin(type_) or type_
    said: dict[Any, dict[str, Any]] = {}
    _collect(type_, said)
    # What is nearer in the order in which Python looks says more; a TypedDict has no such order.
    order = said if typing.is_typeddict(kind) else reversed(kind.__mro__)
    found: dict[str, Any] = {}
    for one in order:
        found |= said.get(one, {})
    for name in _field_names(kind):
        if name in found:
            yield name, found[name]


def _collect(type_: Any, said: dict[Any, dict[str, Any]]) -> None:
    """Note what a class, and each one above it, says of its own names."""
    kind = get_origin(type_) or type_
    variables = getattr(kind, "__parameters__", ())
    given = get_args(type_) or tuple(map(_default, variables))
    bindings = dict(zip(variables, given, strict=False))
    own = inspect.get_annotations(kind)
    # Not by getattr: a class without any would have those of the one above it.
    for base in reversed(vars(kind).get("__orig_bases__", kind.__bases__)):
        plain = get_origin(base) or base
        if isinstance(plain, type) and plain is not object and plain is not typing.Generic:
            _collect(_bound(base, bindings), said)
            if typing.is_typeddict(kind):  # which has those of the ones above it among its own
                above = inspect.get_annotations(plain)
                own = {name: hint for name, hint in own.items() if above.get(name) is not hint}
    if own:
        hints = typing.get_type_hints(kind, include_extras=True)
        said[kind] = {name: _bound(hints[name], bindings) for name in own if name in hints}


def _field_names(kind: Any) -> Iterable[str]:
    """Name the fields of a class; what else is annotated in it is none."""
    names: Iterable[str]
    if issubclass(kind, msgspec.Struct):
        names = kind.__struct_fields__
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [attribute.name for attribute in kind.__attrs_attrs__]
    else:
        names = kind.__annotations__ if typing.is_typeddict(kind) else kind._fields
    return names


def _bound(hint: Any, bindings: Mapping[Any, Any]) -> Any:
    """Put types in the place of type variables."""
    if isinstance(hint, TypeVar):
        return bindings.get(hint, _default(hint))
    variables = () if isinstance(hint, type) and not get_origin(hint) else getattr(hint, "__parameters__", ())
    return hint[tuple(bindings.get(one, _default(one)) for one in variables)] if variables else hint


def _default(variable: Any) -> Any:
    """Return what a type variable stands for where nobody says so."""
    if getattr(variable, "__constraints__", ()):
        return typing.Union[variable.__constraints__]  # noqa: UP007 - of as many as there are
    return getattr(variable, "__bound__", None) or Any


def _plain(type_: Any) -> Any:
    """Take away what only gives a type another name."""
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
    """Go through the arms of a union, whatever they are wrapped in; a type by itself is its only arm."""
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
