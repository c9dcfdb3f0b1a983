"""The base class of connections whose records contain several frames, with the limits on records."""

import abc
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import CLOSED, Close, Connection
from aiotensor.protocol.frames import DECODE_ERRORS, MAX_FRAMES, MAX_RECORD_BYTES, encode_record, unreadable

__all__ = ["RecordConnection"]

Received = TypeVar("Received")
Sent = TypeVar("Sent")

# The bytes that are counted for each frame in addition to its payload, so that no record has more than
# `MAX_FRAMES` frames. Nearly all frames are shorter than this.
_FRAME_BYTES = MAX_RECORD_BYTES // MAX_FRAMES


class RecordConnection(Connection, abc.ABC, Generic[Received, Sent]):
    """One end of a connection whose records contain several frames.

    Args:
        role: the role of this end, for error messages, such as ``"sender"``.
        peer: the name of the other end, for error messages, such as ``"the receiver"``.
        decoder: decodes the records of the peer.
        max_received_bytes: the size in bytes of the longest valid record of the peer.
        max_sent_bytes: the size in bytes of the longest record that the peer accepts.

    Attributes:
        has_full_record: whether a record is complete because the next frame did not fit into it.
    """

    def __init__(
        self,
        role: str,
        peer: str,
        decoder: "msgspec.msgpack.Decoder[list[Received]]",
        max_received_bytes: int,
        max_sent_bytes: int,
    ) -> None:
        super().__init__(role, peer)
        self.has_full_record = False
        self._max_sent_bytes = max_sent_bytes
        self._decode = decoder.decode
        self._max_received_bytes = max_received_bytes
        self._records: list[bytes] = []
        self._frames: list[Sent | Close] = []  # of the next record
        self._nbytes = 0  # counted for these frames

    def receive(self, data: bytes | memoryview) -> list[Received]:
        """Validate a record, and return its frames in order, up to a `Close`.

        An error closes the connection, and no frame of the record is returned.

        Raises:
            ProtocolError: the record is invalid, or a frame in it violates the protocol.
            RefusedError: the peer has another version.
        """
        if self.state is CLOSED:
            return []
        try:
            if len(data) > self._max_received_bytes:
                raise ProtocolError(f"it sent a record of more than {self._max_received_bytes} bytes")
            frames = self._decode(data)
            for count, frame in enumerate(frames, 1):
                self._validate(frame)
                if self.state is CLOSED:  # by a `Close`; checking the type of each frame would be slower
                    return frames[:count]
        except ProtocolError:
            self.state = CLOSED
            raise
        except DECODE_ERRORS as error:
            self.state = CLOSED
            raise unreadable(error) from error
        return frames

    @abc.abstractmethod
    def _validate(self, frame: Received) -> None:
        """Validate a frame of the peer by the rules of the role, and update the state.

        Raises:
            ProtocolError: the frame violates the rules.
            RefusedError: the peer has another version.
        """

    def close(self, close: Close) -> None:
        """Close the connection: `close` is the last frame."""
        self._send(close)
        self.state = CLOSED

    def full_records(self) -> list[bytes]:
        """Return the complete records; the last frames stay, and may share a record with later frames."""
        records, self._records, self.has_full_record = self._records, [], False
        return records

    def data_to_send(self) -> Sequence[bytes]:
        """Return all records to write, including one with the remaining frames."""
        records, self._records, self.has_full_record = self._records, [], False
        if self._frames:
            records.append(encode_record(self._frames))
            self._frames, self._nbytes = [], 0
        return records

    def _send(self, frame: Sent | Close, payload_bytes: int = 0) -> None:
        """Add a frame to the next record; this has no effect on a closed connection."""
        if self.state is CLOSED:
            return
        nbytes = payload_bytes + _FRAME_BYTES
        if self._nbytes + nbytes > self._max_sent_bytes and self._frames:
            self._records.append(encode_record(self._frames))
            self._frames, self._nbytes = [], 0
            self.has_full_record = True
        self._frames.append(frame)
        self._nbytes += nbytes
