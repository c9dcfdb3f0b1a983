import copy
import inspect
import json
import pickle
from typing import Any, get_args

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiotensor.types import (
    MAX_NUMBER,
    Delivery,
    Holder,
    ReceiverStatistics,
    SenderStatistics,
    Statistics,
    TensorHandle,
    Usage,
    Waits,
)

HANDLE = TensorHandle("0123456789abcdef" * 2, 3, 1, "uint8", (120, 720, 1280, 3), "cpu")

handles = st.builds(
    TensorHandle,
    sender=st.text(max_size=40),
    message=st.integers(0, 2**63 - 1),
    tensor=st.integers(0, 2**63 - 1),
    dtype=st.sampled_from(["uint8", "bfloat16", "float8_e4m3fn"]),
    shape=st.lists(st.integers(0, 2**40), max_size=6).map(tuple),
    device=st.sampled_from(["cpu", "cuda:0"]),
)


@given(handle=handles)
def test_any_handle_is_unchanged_by_msgpack_json_and_pickle(handle: TensorHandle) -> None:
    again = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=TensorHandle),
        msgspec.json.decode(msgspec.json.encode(handle), type=TensorHandle),
        msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(handle))), TensorHandle),
        pickle.loads(pickle.dumps(handle)),
        copy.deepcopy(handle),
    ]

    assert again == [handle] * 5
    assert all(type(one.shape) is tuple for one in again)


def test_a_handle_is_a_few_dozen_bytes() -> None:
    assert len(msgspec.msgpack.encode(HANDLE)) < 128


def test_a_handle_can_be_a_key() -> None:
    same = msgspec.msgpack.decode(msgspec.msgpack.encode(HANDLE), type=TensorHandle)

    assert {HANDLE: "found"}[same] == "found"


HOLDER = Holder(3, "open", 100, 0.5)
WAITS = Waits((0.5, 1.0), (3, 0, 1), 2.75)
SENT = SenderStatistics(
    8, 1, 2, 0, 0.5, (HOLDER,), 0, 1, 2, 3, 9, 4, 5, 6, 7, 8, WAITS, WAITS, 1, 100, {"PeerLostError": 2}
)
RECEIVED = ReceiverStatistics(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, {"other": 1})
RECORDS = [HANDLE, Usage(1, 2, 3), HOLDER, WAITS, SENT, RECEIVED]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_cannot_be_changed(record: msgspec.Struct) -> None:
    field = record.__struct_fields__[0]

    with pytest.raises(AttributeError):
        setattr(record, field, "changed")


def test_a_delivery_is_a_handle_and_its_tensor_and_cannot_be_changed() -> None:
    tensor = torch.zeros(3)
    delivery = Delivery(HANDLE, tensor)

    assert delivery.handle is HANDLE
    assert delivery.tensor is tensor
    with pytest.raises(AttributeError):
        delivery.tensor = torch.ones(3)  # type: ignore[misc]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_survives_json(record: msgspec.Struct) -> None:
    told = json.loads(json.dumps(msgspec.to_builtins(record)))

    assert list(told) == list(record.__struct_fields__)
    assert msgspec.convert(told, type(record)) == record


def test_statistics_contain_the_holders() -> None:
    assert SENT.holders[0].bytes == 100
    assert SENT.holders[0].message == 3
    assert msgspec.structs.replace(HOLDER, message=None).message is None


@pytest.mark.parametrize(
    "record", [HANDLE, Usage(1, 2, 3), HOLDER, WAITS], ids=lambda one: type(one).__name__
)
def test_every_field_of_a_record_is_explained(record: msgspec.Struct) -> None:
    for field in record.__struct_fields__:
        assert f"\n    {field}: " in str(inspect.getdoc(type(record)))


@pytest.mark.parametrize("kind", get_args(Statistics), ids=lambda kind: kind.__name__)
def test_every_field_of_statistics_is_declared_with_its_help_text(kind: type[Statistics]) -> None:
    declared = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]

    assert declared.keys() == set(kind.__struct_fields__)
    for name, field in declared.items():
        assert field["description"].endswith("."), name


@pytest.mark.parametrize("value", [-1, 2 * MAX_NUMBER, {"other": -1}, {"E" * 65: 1}], ids=repr)
@pytest.mark.parametrize("record", [SENT, RECEIVED], ids=lambda record: type(record).__name__)
def test_statistics_of_another_process_are_within_bounds(record: msgspec.Struct, value: Any) -> None:
    for name in record.__struct_fields__:
        told = {**msgspec.to_builtins(record), name: value}

        with pytest.raises(msgspec.ValidationError, match=rf"\$\.{name}\b"):
            msgspec.convert(told, type(record))


def test_statistics_with_too_many_errors_or_holders_are_rejected() -> None:
    for many in ({"errors": {f"E{n}": 1 for n in range(33)}}, {"holders": (HOLDER,) * 1025}):
        with pytest.raises(msgspec.ValidationError, match="length <="):
            msgspec.convert(msgspec.to_builtins(msgspec.structs.replace(SENT, **many)), SenderStatistics)
