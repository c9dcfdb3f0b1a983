"""Pickle, protocol 5: plain pyzmq sends the memory of tensors beside the pickle, in separate parts.

The messages contain numpy arrays over the memory of the tensors. These are pickled out of band, not copied;
torch would pickle a tensor with its bytes inside.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from bench.contenders.base import Layout
from bench.contenders.zmq_router import ClientSide, Codec, ServerSide, connect_with
from bench.messages import Embedding, Message, Video


class _Video(msgspec.Struct):
    fps: float
    frames: NDArray[np.generic]


class _Embedding(msgspec.Struct):
    vector: NDArray[np.generic]


def _encode(message: Message) -> list[Any]:
    if isinstance(message, Video):
        value: _Video | _Embedding = _Video(message.fps, message.frames.numpy())
    else:
        value = _Embedding(message.vector.numpy())
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [body, *buffers]


def _decode(parts: "Sequence[zmq.Frame]") -> Message:
    body, *buffers = parts
    value: _Video | _Embedding = pickle.loads(body.buffer, buffers=buffers)
    if isinstance(value, _Video):
        return Video(value.fps, torch.from_numpy(value.frames))
    return Embedding(torch.from_numpy(value.vector))


def connect(layout: Layout) -> tuple[list[ClientSide], ServerSide]:
    return connect_with(Codec(_encode, _decode), layout)
