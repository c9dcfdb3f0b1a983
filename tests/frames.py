"""Frames and statistics for tests that write their own records."""

from typing import Any

import msgspec

from aiotensor.protocol.frames import (
    FROM_SENDER,
    VERSION,
    FromSender,
    Hello,
    Put,
    decode,
)
from aiotensor.protocol.sender import SenderConnection
from aiotensor.statistics.counters import WaitCounter
from aiotensor.types import (
    MAX_TRACE_FIELDS,
    MAX_TRACE_NAME,
    MAX_TRACE_VALUE,
    ReceiverStatistics,
)

__all__ = [
    "NO_WAITS",
    "frames_of",
    "hello",
    "put",
    "receiver_statistics",
    "record_of",
]

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
        "sender": "5" * 32,
        "max_concurrent_videos": 2,
        "arena_bytes": 1 << 20,
    }
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


# A trace context at all its limits.
LONGEST_TRACE = {
    str(number).rjust(MAX_TRACE_NAME, "x"): "x" * MAX_TRACE_VALUE for number in range(MAX_TRACE_FIELDS)
}


def record_of(*frames: object) -> bytes:
    """Encode a record of any values, which need not be frames."""
    return msgspec.msgpack.encode(frames)


def frames_of(sender: SenderConnection) -> list[FromSender]:
    """Return the frames that a sender's end has to send."""
    return [frame for record in sender.data_to_send() for frame in decode(FROM_SENDER, record)]
