import copy
import json
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor.types import (
    MAX_NUMBER,
    Holder,
    ReceiverStatistics,
    SenderStatistics,
    TensorHandle,
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
    assert {handle: "found"}[again[0]] == "found"


HOLDER = Holder(3, "open", 100, 0.5)
WAITS = Waits((0.5, 1.0), (3, 0, 1), 2.75)
SENT = SenderStatistics(
    0, 1, 2, 3, 0.5, 5, 6, 7, 8, 9, WAITS, {"PeerLostError": 2}, 8, 1, 2, (HOLDER,), WAITS, 4, 5, 6, 7, 8
)
RECEIVED = ReceiverStatistics(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, {"other": 1})


@pytest.mark.parametrize("value", [-1, 2 * MAX_NUMBER, {"other": -1}, {"E" * 65: 1}], ids=repr)
@pytest.mark.parametrize("record", [SENT, RECEIVED], ids=lambda record: type(record).__name__)
def test_statistics_of_another_process_are_within_bounds(record: msgspec.Struct, value: Any) -> None:
    for name in record.__struct_fields__:
        told = {**msgspec.to_builtins(record), name: value}

        with pytest.raises(msgspec.ValidationError, match=rf"\$\.{name}\b"):
            msgspec.convert(told, type(record))
