"""The bytes of a tensor over a Unix stream socket, blocking: what the kernel alone asks for a trip.

No queue, no pickle, no shared memory. At small sizes nothing that wakes another process can be much
faster. At large sizes it copies twice through the kernel, and is no floor.
"""

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from bench.contenders.base import Layout

_LENGTH = struct.Struct("=Q")


class SocketPort:
    overlaps = False

    def __init__(self, road: socket.socket) -> None:
        self._road = road

    async def send(self, tensor: torch.Tensor) -> None:
        payload = tensor.numpy().data
        # One call for a small tensor; what a large one leaves over follows.
        sent = self._road.sendmsg([_LENGTH.pack(len(payload)), payload]) - _LENGTH.size
        self._road.sendall(payload[sent:])

    async def receive(self) -> torch.Tensor:
        header = self._road.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(header) < _LENGTH.size:
            raise ConnectionError("the other side closed the socket")
        tensor = torch.empty(_LENGTH.unpack(header)[0], dtype=torch.uint8)
        if self._road.recv_into(tensor.numpy().data, 0, socket.MSG_WAITALL) < len(tensor):
            raise ConnectionError("the other side closed the socket in the middle of a tensor")
        return tensor


@dataclass(frozen=True)
class SocketSide:
    road: socket.socket

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SocketPort]:
        self.road.setblocking(True)
        yield SocketPort(self.road)


def connect(layout: Layout) -> tuple[list[SocketSide], SocketSide]:
    near, far = socket.socketpair()
    return [SocketSide(near)], SocketSide(far)
