"""Counters for statistics, and the fields of statistics that are exported as metrics."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache
from types import TracebackType
from typing import Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from aiotensor import errors
from aiotensor.types import Statistics, Waits

S = TypeVar("S", bound=Statistics)


# Fields


class Field(NamedTuple):
    """A field of statistics that is exported as a metric, as `aiotensor.types` declares it.

    Attributes:
        name: the name of the field.
        text: the help text.
        metric: the name of the metric, without the suffix ``_total`` of counters.
        type: the type of the metric. A counter only grows, and is kept after its object has closed; a
            histogram is a counter of `Waits`; a gauge is a current value.
        waits_for: the value of the label ``for``, which distinguishes the histograms of one metric; "" for
            none.
        is_by_type: whether the field counts errors by their types.
        is_largest: whether the largest value of all objects at an endpoint is exported, instead of the sum.
    """

    name: str
    text: str
    metric: str
    type: Literal["counter", "gauge", "histogram"]
    waits_for: str
    is_by_type: bool
    is_largest: bool


@cache
def exported(kind: type[Statistics]) -> tuple[Field, ...]:
    """Return the exported fields of a class of statistics, in the order of the declarations."""
    declared, types = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    role = kind.__name__.removesuffix("Statistics").lower()
    fields = []
    for name in kind.__struct_fields__:
        for meta in declared[name].__metadata__:
            if isinstance(meta, msgspec.Meta) and meta.extra:
                fields.append(
                    Field(
                        name=name,
                        text=str(meta.description),
                        metric=f"aiotensor_{role}_{meta.extra['metric'] or name}",
                        type="histogram" if types[name] is Waits else meta.extra["type"],
                        waits_for=meta.extra["waits_for"],
                        is_by_type=types[name] == dict[str, int],
                        is_largest=meta.extra["is_largest"],
                    )
                )
    return tuple(fields)


@cache
def counters(kind: type[Statistics]) -> tuple[str, ...]:
    """Return the names of all counters; the other fields describe the current state."""
    return tuple(field.name for field in exported(kind) if field.type != "gauge")


# Counters

# The bounds range from the usual delay of a busy event loop to the time at which most callers have given up.
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_OURS = frozenset(errors.__all__)

# The names under which errors are counted. Their number is limited, unlike that of types in an application.
ERROR_NAMES = (*errors.__all__, "OSError", "other")


def new_counts(kind: type[Statistics]) -> dict[str, int]:
    """Return a dictionary with a zero for each counter of a class of statistics that is a plain number.

    The object counts in this dictionary: ``counts["messages_sent"] += 1``. A name that is not declared raises
    `KeyError`.
    """
    plain = [field.name for field in exported(kind) if field.type == "counter" and not field.is_by_type]
    return dict.fromkeys(plain, 0)


def snapshot(kind: type[S], counts: Mapping[str, object], **fields: object) -> S:
    """Return statistics with the counts from `new_counts` and the other fields, which take precedence."""
    make: Callable[..., S] = kind
    return make(**{**counts, **fields})


class WaitCounter:
    """Count the ended waits for one resource, with any outcome."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a wait of this duration."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    def waits(self) -> Waits:
        """Return the numbers of waits by duration."""
        return Waits(_BOUNDS_S, tuple(self._counts), self._total_s)


class ErrorCounter:
    """Count errors by their types, as a context manager around a call or with `add`."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, error: BaseException) -> None:
        """Count an error, but not a cancellation. Does not keep a reference to the error."""
        if isinstance(error, Exception):
            name = _name_of(type(error))
            self._counts[name] = self._counts.get(name, 0) + 1

    def counts(self) -> dict[str, int]:
        """Return the numbers of errors by the names of their types."""
        return dict(self._counts)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.add(error)


def _name_of(kind: type[Exception]) -> str:
    for base in kind.__mro__:
        if base is OSError or (base.__module__ == errors.__name__ and base.__name__ in _OURS):
            return base.__name__
    return "other"
