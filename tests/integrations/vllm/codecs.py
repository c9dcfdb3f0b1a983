"""An encoder and a decoder with the same hooks as those of vLLM, which the tests in `tests/vllm` use.

They encode a message as a list of buffers: the first contains the structure, the others the bytes of tensors
that no hook took. Tensors of less than 256 bytes are never offered to a hook.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

__all__ = ["Decoder", "Encoder", "Request"]

_LEAST_BYTES = 256

Buffers = Sequence[Any]
Provider = Callable[[str, tuple[int, ...], dict[str, Any]], torch.Tensor]


class Request(msgspec.Struct):
    """A message with tensors in several places, most of which are not those of a video."""

    name: str
    frames: torch.Tensor | None = None
    more: list[torch.Tensor] = []
    number: int = 0


class Encoder:
    """Encode structures with tensors, which it offers to a consumer."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._buffers: list[Any] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_tensor)

    def encode(self, obj: Any) -> Buffers:
        if self._consumer is not None:
            self._consumer.new_message()
        self._buffers = [b""]
        self._buffers[0] = self._encoder.encode(obj)
        return self._buffers

    def _encode_tensor(self, tensor: Any) -> object:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"cannot encode {tensor!r}")
        data: object = None
        if self._consumer is not None and tensor.nbytes >= _LEAST_BYTES:
            data = self._consumer(tensor)
        if data is None:
            data = len(self._buffers)
            self._buffers.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


class Decoder:
    """Decode a `Request`, whose tensors a provider returns."""

    def __init__(self, provider: Provider | None) -> None:
        self._provider = provider
        self._buffers: Buffers = []
        self._decoder = msgspec.msgpack.Decoder(Request, dec_hook=self._decode_tensor)

    def decode(self, bufs: Buffers) -> Request:
        self._buffers = bufs
        return self._decoder.decode(bufs[0])

    def _decode_tensor(self, kind: type, value: Any) -> object:
        dtype, shape, data = value
        if isinstance(data, dict):
            assert self._provider is not None
            return self._provider(dtype, tuple(shape), data)
        flat = torch.frombuffer(bytearray(self._buffers[data]), dtype=torch.uint8)
        return flat.view(getattr(torch, dtype)).view(shape)
