"""Actors of the tests."""

import os

import torch

from aiotensor import TensorHandle, blocking


class Engine:
    """A plain actor with blocking classes."""

    def __init__(self, address: str) -> None:
        self.receiver = blocking.TensorReceiver(address)
        self.receiver.__enter__()

    def pid(self) -> int:
        """Return the process of this actor."""
        return os.getpid()

    def sum_of(self, handle: TensorHandle) -> int:
        """Receive a tensor, and return its sum."""
        return int(self.receiver.receive(handle).sum())

    def take(self, value: object) -> str:
        """Return the type of an argument, and the sum of a tensor."""
        return (
            f"{type(value).__name__} {value.sum()}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )

    def close(self) -> None:
        """Close the receiver."""
        self.receiver.close()
