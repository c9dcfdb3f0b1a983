"""The hook of vLLM's decoder, which receives the tensors of each message."""

from typing import Any

import torch

from aiotensor import blocking
from aiotensor.integrations.vllm.data import handle_of

__all__ = ["TensorProvider"]


class TensorProvider:
    """Receive the tensors of decoded messages; the hook `oob_tensor_provider` of vLLM's ``MsgpackDecoder``.

    It can be used in any thread, for messages of any number of senders, in any order. The tensors of a
    message are kept until they are received or it is discarded, even if later messages are decoded first.

    Args:
        receiver: an open receiver, whose `max_wait_s` limits the wait for a tensor.
    """

    def __init__(self, receiver: blocking.TensorReceiver) -> None:
        self._receiver = receiver

    def __call__(self, dtype: str, shape: tuple[int, ...], data: dict[str, Any]) -> torch.Tensor:
        """Wait for the tensor of a placeholder, and return it.

        Raises:
            PeerLostError: its sender died before the tensor had arrived.
            DiscardedError: its message was discarded.
            AlreadyTakenError: it was received before.
            WouldBlockError: it did not arrive within the receiver's `max_wait_s`.
            ProtocolError: the placeholder was made by another implementation of vLLM's hooks.
            ClosedError: the receiver was closed.
        """
        return self._receiver.receive(handle_of(dtype, shape, data))

    def discard(self, data: dict[str, Any]) -> None:
        """Discard the message of a placeholder, because it will not be decoded."""
        self._receiver.discard(handle_of("", (), data))
