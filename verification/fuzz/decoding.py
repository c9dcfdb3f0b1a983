"""Checks of the decoders: each input is decoded or refused, within bounds of time and memory."""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from aiotensor.codec import TensorDecoder, TensorEncoder
from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol import network
from aiotensor.protocol.frames import decode, decode_hello, encode_record, read_content
from verification.fuzz.notes import Note
from verification.fuzz.steps import Conversation

# Of processor time, for a record of 64 KiB: a hundred times the duration on a slow machine.
_SECONDS = 1.0

# For each byte of the record: a frame of two bytes becomes an object of some dozens.
_AMPLIFIED = 100
_AT_LEAST = 1 << 16

_notes = TensorDecoder(Note)
_any: Any = Any  # mypy does not accept `Any` itself as a `type`
_anything: TensorDecoder[Any] = TensorDecoder(_any)

# Each decoder, and the encoder that restores the accepted input.
_CODECS: tuple[tuple[Callable[[Any], Any], Callable[[Any], bytes]], ...] = (
    (decode, encode_record),
    (decode_hello, lambda hello: encode_record([hello])),
    (read_content, msgspec.msgpack.encode),
    (network.read_area, network.encode_area),
    (network.read_ack, network.encode_ack),
    (network.read_step, lambda found: network.encode_step(found[0]) + found[1]),
    (lambda data: network.read_batch(memoryview(data)), network.encode_batch),
)


class Decoding:
    """The decoders, each of which gets each part of a conversation."""

    def hear(self, said: Conversation) -> None:
        """Decode everything."""
        for step in said.steps:
            for data in (step.data, *map(bytes.fromhex, step.moves)):
                for read, write in _CODECS:
                    found = in_bounds(read, data, len(data))
                    assert found is None or read(write(found)) == found
                _check_move(data)
            parts = [*map(bytes.fromhex, step.parts)]
            _decode_message([step.data, *parts])
            _decode_message(parts or [b""])


def _check_move(data: bytes) -> None:
    """Check that a step is within its block, and that a batch has no more bytes than its message."""
    found = in_bounds(network.read_step, data, len(data))
    if found is not None:
        step, rest = found
        assert not rest or len(rest) == step.length
        assert step.area.block <= step.start < step.start + step.length <= step.area.block + step.nbytes
        assert step.length <= network.STEP_BYTES
    batch = in_bounds(network.read_batch, memoryview(data), len(data))
    assert sum(map(len, batch or ())) <= len(data)


def _decode_message(parts: Sequence[bytes]) -> None:
    """Check that a message is decoded or refused, and that its tensors have no more bytes than it has."""
    nbytes = sum(map(len, parts))
    in_bounds(_anything.decode, parts, nbytes)
    note = in_bounds(_notes.decode, parts, nbytes)
    if note is not None:
        distinct = {id(tensor): tensor.nbytes for tensor in note.tensors}  # others are tied to these
        assert sum(distinct.values()) <= nbytes
        again = _written(note)
        assert _written(_notes.decode(again)) == again


def _written(note: Note) -> list[bytes]:
    return [bytes(part) for part in TensorEncoder().encode(note)]


def in_bounds(decode: Callable[[Any], Any], data: bytes | memoryview | Sequence[bytes], nbytes: int) -> Any:
    """Decode, and return None if the data is refused; check that this takes little time and memory."""
    tracemalloc.start()
    began = time.process_time()
    try:
        found = decode(data)
    except (ProtocolError, RefusedError):
        found = None
    finally:
        seconds = time.process_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert seconds < _SECONDS, f"{seconds} s for {nbytes} bytes"
    assert peak < _AT_LEAST + _AMPLIFIED * nbytes, f"{peak} bytes for {nbytes}"
    return found
