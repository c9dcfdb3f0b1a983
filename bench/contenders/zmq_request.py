"""Plain pyzmq, as it is written by hand: a small header, and the memory of the tensor as a part beside it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import zmq

from bench.contenders.base import Layout
from bench.contenders.zmq_router import ClientSide, Codec, ServerSide, connect_with
from bench.messages import Embedding, Message, Video, tensor_of

_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Header(msgspec.Struct, array_like=True):
    fps: float | None  # None in an embedding
    dtype: str
    shape: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def _encode(message: Message) -> list[Any]:
    tensor = tensor_of(message)
    fps = message.fps if isinstance(message, Video) else None
    return [_encoder.encode(_Header(fps, _NAMES[tensor.dtype], tuple(tensor.shape))), tensor.numpy()]


def _decode(parts: "Sequence[zmq.Frame]") -> Message:
    header = _decoder.decode(parts[0].buffer)
    # The tensor is a view of the frame, and keeps it alive.
    tensor = torch.frombuffer(parts[1].buffer, dtype=_DTYPES[header.dtype]).view(header.shape)
    return Embedding(tensor) if header.fps is None else Video(header.fps, tensor)


def connect(layout: Layout) -> tuple[list[ClientSide], ServerSide]:
    return connect_with(Codec(_encode, _decode), layout)
