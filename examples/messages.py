"""The requests of the servers to the engine, and its answers."""

from typing import Annotated

import msgspec
import torch

from aiotensor.codec import TensorMeta


class Batch(msgspec.Struct):
    """Consecutive frames of a video."""

    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]


class Summary(msgspec.Struct):
    """The answer of the model: the mean colour of each frame, of shape (frames, 3)."""

    colours: Annotated[torch.Tensor, TensorMeta(dtype=torch.float32, shape=(None, 3))]
