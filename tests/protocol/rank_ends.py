"""One end of the connection between two ranks, and frames of the other end."""

import pytest

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import CLOSED
from aiotensor.protocol.frames import ARENA, OUT_OF_BAND, VERSION, Put, encode_record
from aiotensor.protocol.ranks import FROM_RANK, LEAST_MESSAGE_BYTES, FromRank, Join, PutNone, RankConnection
from tests.frames import put

__all__ = [
    "MAX_BYTES",
    "in_segment",
    "inline",
    "join",
    "joined",
    "new",
    "receive",
    "sent",
    "violation",
    "with_data",
]

MAX_BYTES = 4 * LEAST_MESSAGE_BYTES


def join(max_bytes: int = MAX_BYTES, version: int = VERSION) -> Join:
    """Return the first frame of the other end."""
    return Join(version, 43, max_bytes)


def new(max_bytes: int = MAX_BYTES) -> RankConnection:
    """Return an end whose own `Join` was sent."""
    connection = RankConnection(Join(VERSION, 42, max_bytes), "rank 1")
    assert sent(connection) == [Join(VERSION, 42, max_bytes)]
    return connection


def joined(*frames: FromRank, max_bytes: int = MAX_BYTES) -> RankConnection:
    """Return an open end that has received these frames, each in its own record."""
    connection = new(max_bytes)
    for frame in (join(max_bytes), *frames):
        assert receive(connection, frame) == [frame]
    return connection


def sent(connection: RankConnection) -> list[FromRank]:
    """Return the frames that an end has to send."""
    return [frame for record in connection.data_to_send() for frame in FROM_RANK.decode(record)]


def receive(connection: RankConnection, *frames: object) -> list[FromRank]:
    """Pass a record to an end, and return the frames that it accepts."""
    return connection.receive(encode_record(frames))


def violation(connection: RankConnection, *frames: object) -> str:
    """Receive a record that is a violation, and return the reason."""
    with pytest.raises(ProtocolError) as caught:
        receive(connection, *frames)
    assert connection.state is CLOSED
    assert receive(connection, PutNone(100)) == []
    return str(caught.value)


def inline(message: int, nbytes: int) -> Put:
    """Return a message whose tensor is in its frame."""
    return put(message=message, shape=(nbytes,), payload=bytes(nbytes), last=True)


def in_segment(message: int, block: int = 0) -> Put:
    """Return a message whose tensor is in shared memory."""
    return put(message=message, placement=ARENA, payload=bytes(16), block=block, last=True)


def with_data(message: int) -> Put:
    """Return a message whose bytes the transport carries."""
    return put(message=message, placement=OUT_OF_BAND, payload=b"", last=True)
