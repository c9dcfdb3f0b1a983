"""The bytes of a tensor over a Unix stream socket, blocking: the cost of the kernel alone.

No queue, no pickle, no shared memory. At small sizes no contender that wakes another process can be much
faster. At large sizes it copies twice through the kernel, and is no lower bound.
"""

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from bench.contenders.base import Layout

__all__ = ["SocketPort", "connect"]

_LENGTH = struct.Struct("=Q")


class SocketPort:
    overlaps = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def send(self, tensor: torch.Tensor) -> None:
        payload = tensor.numpy().data
        # One call for a small tensor; a second call sends the rest of a large one.
        sent = self._sock.sendmsg([_LENGTH.pack(len(payload)), payload]) - _LENGTH.size
        self._sock.sendall(payload[sent:])

    async def receive(self) -> torch.Tensor:
        header = self._sock.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(header) < _LENGTH.size:
            raise ConnectionError("the other side closed the socket")
        tensor = self.memory(_LENGTH.unpack(header)[0])
        if self._sock.recv_into(tensor.numpy().data, 0, socket.MSG_WAITALL) < len(tensor):
            raise ConnectionError("the other side closed the socket in the middle of a tensor")
        return tensor

    def memory(self, size: int) -> torch.Tensor:
        """Return memory for a tensor."""
        return torch.empty(size, dtype=torch.uint8)


@dataclass(frozen=True)
class SocketSide:
    sock: socket.socket

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SocketPort]:
        self.sock.setblocking(True)
        yield SocketPort(self.sock)


def connect(layout: Layout) -> tuple[list[SocketSide], SocketSide]:
    near, far = socket.socketpair()
    return [SocketSide(near)], SocketSide(far)
