"""The fields of statistics and their metrics, derived from the declarations in `aiotensor.types`."""

from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_type_hints

import msgspec

from aiotensor.types import Export, Statistics, Waits

__all__ = ["Family", "Field", "counters", "families_of", "plain_counters"]

_Type: TypeAlias = Literal["counter", "gauge", "histogram"]


class Field(NamedTuple):
    """An exported field of statistics.

    Attributes:
        name: the name of the field.
        text: its help text.
        metric: the name of its metric.
        type: the type of its metric; a histogram comes from `Waits`.
        labels: the labels that distinguish fields with the same metric, with their values.
        is_by_type: it counts errors by their types.
        is_largest: at each endpoint the largest value of all objects is exported, not the sum.
    """

    name: str
    text: str
    metric: str
    type: _Type
    labels: dict[str, str]
    is_by_type: bool
    is_largest: bool


class Family(NamedTuple):
    """A metric, with the fields that it comes from.

    Attributes:
        name: the name of the metric, without the suffix ``_total`` of counters.
        type: its type.
        text: its help text.
        labels: the names of its labels.
        fields: the fields that it comes from.
        is_largest: at each endpoint the largest value of all objects is exported, not the sum.
    """

    name: str
    type: _Type
    text: str
    labels: tuple[str, ...]
    fields: tuple[Field, ...]
    is_largest: bool


@cache
def families_of(kind: type[Statistics]) -> tuple[Family, ...]:
    """Return the metrics of a class of statistics, in the order of the declarations."""
    by_metric: dict[str, list[Field]] = {}
    for field in _exported(kind):
        by_metric.setdefault(field.metric, []).append(field)
    return tuple(_family(*fields) for fields in by_metric.values())


@cache
def counters(kind: type[Statistics]) -> tuple[str, ...]:
    """Return the names of all counters; the other fields describe the current state."""
    return tuple(field.name for field in _exported(kind) if field.type != "gauge")


@cache
def plain_counters(kind: type[Statistics]) -> tuple[str, ...]:
    """Return the names of the counters that are single numbers."""
    return tuple(field.name for field in _exported(kind) if field.type == "counter" and not field.is_by_type)


@cache
def _exported(kind: type[Statistics]) -> tuple[Field, ...]:
    """Return the exported fields, in the order of the declarations."""
    declared, types = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    return tuple(
        _field(kind, name, types[name], str(meta.description), meta.extra["export"])
        for name in kind.__struct_fields__
        for meta in declared[name].__metadata__
        if isinstance(meta, msgspec.Meta) and meta.extra
    )


def _field(kind: type[Statistics], name: str, value_type: Any, text: str, export: Export) -> Field:
    role = kind.__name__.removesuffix("Statistics").lower()
    return Field(
        name=name,
        text=text,
        metric=f"aiotensor_{role}_{export.metric or name}",
        type="histogram" if value_type is Waits else export.kind,
        labels=dict(export.labels),
        is_by_type=value_type == dict[str, int],
        is_largest=export.is_largest,
    )


def _family(first: Field, *others: Field) -> Family:
    fields = (first, *others)
    return Family(
        name=first.metric,
        type=first.type,
        text=" ".join(field.text for field in fields),
        labels=("endpoint", *first.labels, *(["type"] if first.is_by_type else [])),
        fields=fields,
        is_largest=first.is_largest,
    )
