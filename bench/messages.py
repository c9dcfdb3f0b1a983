"""The messages of a request and its answer, each with a tensor inside."""

import msgspec
import torch

from bench.records import Reply

__all__ = ["REPLY_TYPES", "Embedding", "Message", "Video", "tensor_of"]


class Video(msgspec.Struct):
    """The content of a request."""

    fps: float
    frames: torch.Tensor


class Embedding(msgspec.Struct):
    """A small answer."""

    vector: torch.Tensor


Message = Video | Embedding

REPLY_TYPES: dict[Reply, type[Message]] = {"echo": Video, "answer": Embedding}


def tensor_of(message: Message) -> torch.Tensor:
    """Return the only tensor of a message."""
    return message.frames if isinstance(message, Video) else message.vector
