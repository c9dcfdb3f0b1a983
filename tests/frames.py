"""Frames and statistics for tests that write their own records."""

from typing import Any

import msgspec

from aiotensor.protocol.connection import Connection
from aiotensor.protocol.frames import VERSION, Frame, Hello, Message, Put, decode
from aiotensor.statistics.counters import WaitCounter
from aiotensor.types import (
    MAX_TRACE_FIELDS,
    MAX_TRACE_NAME,
    MAX_TRACE_VALUE,
    ReceiverStatistics,
)

NO_WAITS = WaitCounter().waits()


def receiver_statistics(**changes: object) -> ReceiverStatistics:
    """Return the statistics of an unused receiver, with some fields changed."""
    fields: dict[str, Any] = {**dict.fromkeys(ReceiverStatistics.__struct_fields__, 0), "errors": {}}
    return ReceiverStatistics(**{**fields, **changes})


def hello(**changes: object) -> Hello:
    """Return the first frame of a sender, with some fields changed."""
    fields: dict[str, Any] = {
        "version": VERSION,
        "pid": 42,
        "role": "sender",
        "id": "5" * 32,
        "max_messages": 2,
        "arena_bytes": 1 << 20,
    }
    return Hello(**{**fields, **changes})


def receiver_hello(**changes: object) -> Hello:
    """Return the first frame of a receiver that admits a sender, with some fields changed."""
    fields: dict[str, Any] = {"version": VERSION, "pid": 7, "role": "receiver", "id": "r"}
    return Hello(**{**fields, **changes})


def put(**changes: object) -> Put:
    """Announce a small tensor that is placed inline, with some fields changed."""
    fields: dict[str, Any] = {
        "message": 0,
        "tensor": 0,
        "dtype": "uint8",
        "shape": (3,),
        "device": "cpu",
        "placement": "inline",
        "payload": b"abc",
    }
    return Put(**{**fields, **changes})


def publish(number: int, **changes: object) -> Message:
    """Announce a publication without tensors, with some fields changed."""
    fields: dict[str, Any] = {"message": number, "placement": "inline", "payload": b"x", "nbytes": 1}
    return Message(**{**fields, **changes})


# A trace context at all its limits.
LONGEST_TRACE = {
    str(number).rjust(MAX_TRACE_NAME, "x"): "x" * MAX_TRACE_VALUE for number in range(MAX_TRACE_FIELDS)
}


def record_of(*frames: object) -> bytes:
    """Encode a record of any values, which need not be frames."""
    return msgspec.msgpack.encode(frames)


def frames_of(connection: Connection) -> list[Frame]:
    """Return the frames that one end has to send."""
    return [frame for record in connection.data_to_send() for frame in decode(record)]
