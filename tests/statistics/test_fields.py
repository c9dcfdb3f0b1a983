"""Metrics and counters derive from the declared fields of statistics."""

from typing import get_args

import pytest

from aiotensor.statistics.fields import counters, families_of, plain_counters
from aiotensor.types import ClientStatistics, SenderStatistics, Statistics

KINDS: tuple[type[Statistics], ...] = get_args(Statistics)


def test_no_two_metrics_have_the_same_name() -> None:
    names = [family.name for kind in KINDS for family in families_of(kind)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_with_the_same_metric_have_the_same_type_and_differ_in_their_labels(
    kind: type[Statistics],
) -> None:
    for family in families_of(kind):
        assert {field.type for field in family.fields} == {family.type}
        assert len({tuple(field.labels.items()) for field in family.fields}) == len(family.fields)
        assert {tuple(field.labels) for field in family.fields} == {
            tuple(label for label in family.labels if label not in ("endpoint", "type"))
        }


def test_all_fields_but_holders_and_limits_for_each_client_are_exported() -> None:
    exported = {field.name for kind in KINDS for family in families_of(kind) for field in family.fields}
    declared = {name for kind in KINDS for name in kind.__struct_fields__}
    assert declared - exported == {
        "address",
        "engines",
        "holders",
        "lags",
        "max_waiting",
        "max_waiting_bytes",
    }


def test_counters_are_numbers_waits_and_errors() -> None:
    assert counters(ClientStatistics) == (*plain_counters(ClientStatistics), "errors")
    others = set(counters(SenderStatistics)) - set(plain_counters(SenderStatistics))
    assert others == {"permit_waits", "memory_waits", "errors"}


def test_waits_of_both_kinds_are_one_histogram() -> None:
    [waits] = [family for family in families_of(SenderStatistics) if family.type == "histogram"]
    assert waits.name == "aiotensor_sender_wait_seconds"
    assert waits.labels == ("endpoint", "for")
    assert [field.labels for field in waits.fields] == [{"for": "permit"}, {"for": "memory"}]
