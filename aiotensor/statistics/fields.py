"""The fields of statistics and their metrics, derived from the declarations in `aiotensor.types`."""

from functools import cache
from typing import Literal, NamedTuple, TypeAlias, get_type_hints

import msgspec

from aiotensor.types import Export, Statistics, Waits

__all__ = ["Family", "Field", "counters", "families_of", "plain_counters"]

_Type: TypeAlias = Literal["counter", "gauge", "histogram"]


class Field(NamedTuple):
    """An exported field of statistics; see `aiotensor.types.Export`.

    Attributes:
        text: the help text.
        metric: the name of the metric.
        type: the type of the metric; a histogram comes from `Waits`.
        is_by_type: whether the field counts errors by their types.
    """

    name: str
    text: str
    metric: str
    type: _Type
    labels: dict[str, str]
    is_by_type: bool
    is_largest: bool


class Family(NamedTuple):
    """A metric, and the fields whose values it exports.

    Attributes:
        name: the name of the metric, without the suffix ``_total`` of counters.
        labels: the names of its labels.
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
    role = kind.__name__.removesuffix("Statistics").lower()
    fields = []
    for name in kind.__struct_fields__:
        for meta in declared[name].__metadata__:
            if isinstance(meta, msgspec.Meta) and meta.extra:
                export: Export = meta.extra["export"]
                fields.append(
                    Field(
                        name=name,
                        text=str(meta.description),
                        metric=f"aiotensor_{role}_{export.metric or name}",
                        type="histogram" if types[name] is Waits else export.kind,
                        labels=dict(export.labels),
                        is_by_type=types[name] == dict[str, int],
                        is_largest=export.is_largest,
                    )
                )
    return tuple(fields)


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
