"""The requests of the API server to the engine, its answers, and the port of the engine."""

from typing import Annotated

import msgspec
import torch

from aiotensor.codec import TensorMeta

PORT = 7000


class Video(msgspec.Struct):
    """The frames of a video, of shape (frames, height, width, 3)."""

    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]


class Summary(msgspec.Struct):
    """The answer of the model."""

    frames: int
    brightness: float  # the mean over all frames, from 0 to 255
