"""The message of a request and of its answer, with a tensor inside."""

import msgspec
import torch


class Message(msgspec.Struct):
    """Frames of a video, or an embedding."""

    fps: float
    tensor: torch.Tensor
