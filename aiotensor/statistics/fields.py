"""The declared fields of statistics, as `aiotensor.types` declares them."""

from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_type_hints

import msgspec

from aiotensor.types import Export, Statistics, Waits

__all__ = ["Field", "exported", "plain_counters"]

_Type: TypeAlias = Literal["counter", "gauge", "histogram"]


class Field(NamedTuple):
    """An exported field of statistics.

    Attributes:
        name: the name of the field.
        text: its help text.
        metric: the name of its metric, without the suffix ``_total`` of counters.
        type: the type of its metric.
        labels: the labels that distinguish fields with the same metric, and their values.
        is_plain: whether its value is a single number.
        is_largest: at each endpoint the largest value of all objects is exported, not the sum.
    """

    name: str
    text: str
    metric: str
    type: _Type
    labels: dict[str, str]
    is_plain: bool
    is_largest: bool


@cache
def exported(kind: type[Statistics]) -> tuple[Field, ...]:
    """Return the exported fields of a class of statistics, in the order of their declarations."""
    declared, types = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    return tuple(
        _field(kind, name, types[name], str(meta.description), meta.extra["export"])
        for name in kind.__struct_fields__
        for meta in declared[name].__metadata__
        if isinstance(meta, msgspec.Meta) and meta.extra
    )


@cache
def plain_counters(kind: type[Statistics]) -> tuple[str, ...]:
    """Return the names of the counters that are single numbers."""
    return tuple(field.name for field in exported(kind) if field.type == "counter" and field.is_plain)


def _field(kind: type[Statistics], name: str, of: Any, text: str, export: Export) -> Field:
    role = kind.__name__.removesuffix("Statistics").lower()
    return Field(
        name=name,
        text=text,
        metric=f"aiotensor_{role}_{export.metric or name}",
        type="histogram" if of is Waits else export.kind,
        labels=dict(export.labels),
        is_plain=of is int,
        is_largest=export.is_largest,
    )
