"""The decoders alone: what they make of any bytes, and what that costs."""

import time
import tracemalloc

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import ToReceiver, ToSender, decode_to_receiver, decode_to_sender, encode

__all__ = ["decode_both_ways"]

# Of processor time, for a record of 64 KiB: a hundred times what it takes on a slow machine.
_SECONDS = 1.0

# For each byte of the record: a frame of two bytes becomes an object of some dozens.
_AMPLIFIED = 100
_AT_LEAST = 1 << 16


def decode_both_ways(record: bytes) -> None:
    """See that both decoders read frames or refuse, and that what was read is written alike."""
    for decode in (decode_to_receiver, decode_to_sender):
        tracemalloc.start()
        began = time.process_time()
        try:
            frames = decode(record)
        except ProtocolError:
            frames = None
        finally:
            seconds = time.process_time() - began
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert seconds < _SECONDS, f"{seconds} s for {len(record)} bytes"
        assert peak < _AT_LEAST + _AMPLIFIED * len(record), f"{peak} bytes for {len(record)}"
        if frames is not None:
            assert all(isinstance(frame, ToReceiver | ToSender) for frame in frames)
            assert decode(encode(*frames)) == frames
