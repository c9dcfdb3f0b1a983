"""A message with all kinds of fields, and a decoder that returns such a message or refuses."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
import torch

from aiotensor.codec import TensorDecoder, TensorMeta
from aiotensor.errors import ProtocolError
from tests.codec.messages import Box, Crate, Labelled, Options, anything, plain, tensors_in

Received = Sequence[bytes | bytearray | memoryview]


class Scene(msgspec.Struct):
    """A message with fields of all kinds."""

    frames: Annotated[torch.Tensor, TensorMeta(shape=(None, 3))] | None = None
    mask: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    boxes: list[Box[torch.Tensor]] = []
    crate: Crate[Any] | None = None
    labelled: dict[str, Labelled[np.ndarray[Any, Any]]] = {}
    options: Options[torch.Tensor] | None = None
    rest: Any = None
    below: "Scene | None" = None


def deny(handle: object) -> torch.Tensor:
    raise ProtocolError("nothing is there")


def find(handle: object) -> torch.Tensor:
    return torch.zeros((2, 3), dtype=torch.uint8)  # valid in every position


DECODERS: dict[str, TensorDecoder[Any]] = {
    "of anything": anything,
    "of a Struct": TensorDecoder(Scene),
    "of a Struct, with a find": TensorDecoder(Scene, find),
    "of anything, with a find that knows nothing": TensorDecoder(Any, deny),
}
every_decoder = pytest.mark.parametrize("which", DECODERS)


def read_or_refuse(decoder: TensorDecoder[Any], parts: Received) -> None:
    """Decode the parts from a peer; fail on errors other than refusals, and on invalid messages."""
    try:
        message = decoder.decode(parts)
    except ProtocolError:
        return
    for tensor in tensors_in(message):
        assert isinstance(plain(tensor), tuple), "its values can be read"
    if isinstance(message, Scene):
        assert message.frames is None or (message.frames.dim() == 2 and message.frames.shape[1] == 3)
        assert message.mask is None or message.mask.dtype == np.uint8
