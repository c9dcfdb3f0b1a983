"""What is on its way: messages, their tensors, and how a tensor is announced."""

import threading

import torch

from aiotensor.placements import Placed, Plan, name_of_dtype
from aiotensor.protocol.frames import Put
from aiotensor.types import TensorHandle

__all__ = ["Job", "Message"]


class Message:
    """A message that holds a permit."""

    def __init__(self) -> None:
        self.number: int | None = None  # known with the first announcement
        self.count = 0  # tensors announced
        self.sending = 0  # sends that have not returned
        self.awaits_bytes = 0  # of those, the ones that wait for bytes
        self.is_whole = False
        self.has_ended = False  # it was taken, discarded or lost
        self.is_lost = False


class Job:
    """One tensor on its way to the receiver.

    Args:
        message: the message that it belongs to.
        source: the tensor.
        plan: how it travels.
        block: the number of the block that it is in or will be in, or None.
        last: whether it makes its message whole.
    """

    def __init__(
        self, message: Message, source: torch.Tensor, plan: Plan, block: int | None, *, last: bool
    ) -> None:
        self.message = message
        self.source = source
        self.plan = plan
        self.block = block
        self.last = last
        self.abandoned = threading.Event()
        self.handle: TensorHandle | None = None  # set when it was announced

    def announcement(self, sender: str, number: int, placed: Placed) -> tuple[TensorHandle, Put]:
        """Make the handle of the tensor and the frame that announces it, as message `number`."""
        source = self.source
        handle = TensorHandle(
            sender=sender,
            message=number,
            tensor=self.message.count,
            dtype=str(name_of_dtype(source.dtype)),
            shape=tuple(source.shape),
            device=str(source.device),
        )
        put = Put(
            message=handle.message,
            tensor=handle.tensor,
            dtype=handle.dtype,
            shape=handle.shape,
            device=handle.device,
            placement=placed.placement,
            payload=placed.payload,
            block=self.block,
            last=self.last,
            requires_grad=source.requires_grad,
            is_parameter=isinstance(source, torch.nn.Parameter),
        )
        return handle, put
