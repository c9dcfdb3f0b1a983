"""What the servers of these examples ask the engine, and what it answers."""

import os
from typing import Annotated

import msgspec
import torch

from aiotensor.codec import TensorMeta

FOLDER = os.environ.get("XDG_RUNTIME_DIR", "/tmp")
TENSORS = f"unix://{FOLDER}/example-engine.tensors"
MESSAGES = f"ipc://{FOLDER}/example-engine.messages"


class Batch(msgspec.Struct):
    """Some frames of a video, one after the other."""

    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]


class Summary(msgspec.Struct):
    """What the model says of them: for each frame its mean colour, of shape (frames, 3)."""

    colours: Annotated[torch.Tensor, TensorMeta(dtype=torch.float32, shape=(None, 3))]
