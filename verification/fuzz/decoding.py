"""Checks of the decoders: each input is decoded or refused, within bounds of time and memory."""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from aiotensor.codec import TensorDecoder, TensorEncoder
from aiotensor.errors import ProtocolError
from aiotensor.protocol import network
from aiotensor.protocol.broadcast import (
    FROM_SUBSCRIBER,
    TO_SUBSCRIBER,
    Content,
    FromSubscriber,
    ToSubscriber,
)
from aiotensor.protocol.exchange import FromClient, FromServer, read_from_client, read_from_server, write
from aiotensor.protocol.frames import (
    FROM_SENDER,
    OPENING,
    TO_INSPECTOR,
    TO_SENDER,
    FromSender,
    Opening,
    ToInspector,
    ToSender,
    decode,
    encode_record,
)
from aiotensor.protocol.ranks import FROM_RANK, FromRank
from aiotensor.protocol.subscriber import read_content
from verification.fuzz.notes import Note

__all__ = ["decode_both_ways", "decode_content", "decode_headers", "decode_message", "decode_moves"]

# Of processor time, for a record of 64 KiB: a hundred times the duration on a slow machine.
_SECONDS = 1.0

# For each byte of the record: a frame of two bytes becomes an object of some dozens.
_AMPLIFIED = 100
_AT_LEAST = 1 << 16

_notes = TensorDecoder(Note)
_DECODERS: tuple[Any, ...] = (
    *(OPENING, FROM_SENDER, TO_SENDER, TO_INSPECTOR),
    *(FROM_SUBSCRIBER, TO_SUBSCRIBER, FROM_RANK),
)
_FRAMES = Opening | FromSender | ToSender | ToInspector | FromSubscriber | ToSubscriber | FromRank
_any: Any = Any  # mypy does not accept `Any` itself as a `type`
_anything: TensorDecoder[Any] = TensorDecoder(_any)


def decode_both_ways(record: bytes) -> None:
    """Check that each decoder reads or refuses a record, and that its frames survive a round trip."""
    for decoder in _DECODERS:
        read = partial(decode, decoder)
        frames = _in_bounds(read, record, len(record))
        if frames is not None:
            assert all(isinstance(frame, _FRAMES) for frame in frames)
            assert read(encode_record(frames)) == frames


def decode_moves(data: bytes) -> None:
    """Check that a message about moves is read or refused, within bounds, and survives a round trip."""
    found = _in_bounds(network.read_step, data, len(data))
    if found is not None:
        step, rest = found
        assert isinstance(step, network.Step)
        assert not rest or len(rest) == step.length
        assert step.area.block <= step.start < step.start + step.length <= step.area.block + step.nbytes
        assert step.length <= network.STEP_BYTES
        assert network.read_step(network.encode_step(step) + rest) == (step, rest)
    batch = _in_bounds(network.read_batch, memoryview(data), len(data))
    if batch is not None:
        assert sum(map(len, batch)) <= len(data)
        assert network.read_batch(memoryview(network.encode_batch(batch))) == batch
    area = _in_bounds(network.read_area, data, len(data))
    if area is not None:
        assert isinstance(area, network.Area)
        assert network.read_area(network.encode_area(area)) == area
    carried = _in_bounds(network.read_data, memoryview(data), len(data))
    if carried is not None:
        record, rest = carried
        assert (len(data) - len(rest)) % 8 == 0
        again = network.encode_data(bytes(record)) + rest
        assert network.read_data(memoryview(again)) == (record, rest)
    ack = _in_bounds(network.read_ack, data, len(data))
    if ack is not None:
        assert isinstance(ack, network.Ack)
        assert network.read_ack(network.encode_ack(ack)) == ack


def decode_content(data: bytes) -> None:
    """Check that a content is decoded or refused, and that a decoded one survives a round trip."""
    content = _in_bounds(read_content, data, len(data))
    if content is not None:
        assert isinstance(content, Content)
        assert read_content(msgspec.msgpack.encode(content)) == content


def decode_headers(data: bytes) -> None:
    """Check that each side decodes or refuses a header, and that a decoded header survives a round trip."""
    for read in (read_from_client, read_from_server):
        header = _in_bounds(read, data, len(data))
        if header is not None:
            assert isinstance(header, FromClient | FromServer)
            assert read(write(header)) == header


def decode_message(parts: Sequence[bytes]) -> None:
    """Check that a message is decoded or refused, and that its tensors have no more bytes than it has."""
    nbytes = sum(map(len, parts))
    _in_bounds(_anything.decode, parts, nbytes)
    note = _in_bounds(_notes.decode, parts, nbytes)
    if note is not None:
        distinct = {id(tensor): tensor.nbytes for tensor in note.tensors}  # others are tied to these
        assert sum(distinct.values()) <= nbytes
        again = _written(note)
        assert _written(_notes.decode(again)) == again


def _written(note: Note) -> list[bytes]:
    return [bytes(part) for part in TensorEncoder().encode(note)]


def _in_bounds(decode: Callable[[Any], Any], data: bytes | memoryview | Sequence[bytes], nbytes: int) -> Any:
    """Decode, and return None if the decoder refuses the data; check that it takes little time and memory."""
    tracemalloc.start()
    began = time.process_time()
    try:
        found = decode(data)
    except ProtocolError:
        found = None
    finally:
        seconds = time.process_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert seconds < _SECONDS, f"{seconds} s for {nbytes} bytes"
    assert peak < _AT_LEAST + _AMPLIFIED * nbytes, f"{peak} bytes for {nbytes}"
    return found
